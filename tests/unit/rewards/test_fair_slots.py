"""Turns at the worker processes, without processes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reroll.rewards.slots import FairSlots


async def has_turn(slots: FairSlots, name: str) -> bool:
    """Whether a turn is there at once; it is kept if so."""
    try:
        await asyncio.wait_for(slots.take(name), 0.01)
    except TimeoutError:
        return False
    return True


async def test_a_name_that_takes_all_it_can_leaves_every_other_name_its_own_slot() -> None:
    slots = FairSlots(num_shared=3)
    assert [await has_turn(slots, "slow") for _ in range(5)] == [True, True, True, True, False]
    assert [await has_turn(slots, "quick") for _ in range(2)] == [True, False]
    assert await has_turn(slots, "third")


async def test_a_shared_slot_goes_to_the_name_that_holds_the_fewest() -> None:
    slots = FairSlots(num_shared=2)
    for name in ("slow", "slow", "slow", "quick"):
        await slots.take(name)
    order: list[str] = []

    async def wait(name: str) -> None:
        await slots.take(name)
        order.append(name)

    tasks = [asyncio.create_task(wait(name)) for name in ("slow", "slow", "quick")]
    await asyncio.sleep(0)
    slots.give_back("slow")
    await asyncio.sleep(0)
    assert order == ["quick"]
    for task in tasks:
        task.cancel()


async def test_within_a_name_first_come_is_first_served() -> None:
    slots = FairSlots(num_shared=0)
    await slots.take("a")
    order: list[int] = []

    async def wait(number: int) -> None:
        await slots.take("a")
        order.append(number)
        slots.give_back("a")

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(wait(number))
        await asyncio.sleep(0)
        slots.give_back("a")
    assert order == [0, 1, 2, 3]


async def test_a_cancelled_wait_passes_its_turn_on() -> None:
    slots = FairSlots(num_shared=0)
    await slots.take("a")
    given_up = asyncio.create_task(slots.take("a"))
    patient = asyncio.create_task(slots.take("a"))
    await asyncio.sleep(0)
    slots.give_back("a")  # The turn is given to the first, who is cancelled before it can run.
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await asyncio.wait_for(patient, 60)
    assert not await has_turn(slots, "a")


@given(
    num_shared=st.integers(0, 4),
    calls=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()), max_size=40),
)
def test_no_more_slots_are_held_than_there_are_and_all_calls_get_one(
    num_shared: int, calls: list[tuple[str, int, bool]]
) -> None:
    async def run() -> tuple[int, int]:
        slots = FairSlots(num_shared=num_shared)
        held: list[str] = []
        most = num_served = 0

        async def call(name: str, num_ticks: int) -> None:
            nonlocal most, num_served
            await slots.take(name)
            try:
                held.append(name)
                extra = sum(max(0, held.count(other) - 1) for other in "abc")
                most = max(most, extra)
                for _ in range(num_ticks):
                    await asyncio.sleep(0)
                num_served += 1
            finally:
                held.remove(name)
                slots.give_back(name)

        tasks = [asyncio.create_task(call(name, num_ticks)) for name, num_ticks, _ in calls]
        for task, (_, num_ticks, is_cancelled) in zip(tasks, calls, strict=True):
            if is_cancelled:
                for _ in range(num_ticks):
                    await asyncio.sleep(0)
                task.cancel()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        return most, num_served - sum(outcome is None for outcome in done)

    most, difference = asyncio.run(run())
    assert most <= num_shared
    assert difference == 0
