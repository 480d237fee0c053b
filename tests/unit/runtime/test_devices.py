from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reroll.runtime.devices import DeviceMap


class Log:
    """Notes down what happens, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def hook(self, line: str) -> Callable[[tuple[int, ...]], Awaitable[None]]:
        async def note(ranks: tuple[int, ...]) -> None:
            await asyncio.sleep(0)
            self.lines.append(f"{line} {list(ranks)}")

        return note


async def settle() -> None:
    """Until nobody can go on: whoever is not waiting has had a turn."""
    for _ in range(20):
        await asyncio.sleep(0)


async def hold(devices: DeviceMap, role: str, log: Log, *, until: asyncio.Event | None = None) -> None:
    async with devices.lease(role):
        log.lines.append(f"{role} in")
        await (until.wait() if until else asyncio.sleep(0.001))
        log.lines.append(f"{role} out")


async def test_roles_on_the_same_gpu_take_turns_in_the_order_of_asking() -> None:
    devices, log = DeviceMap({"policy": ("0",), "engine": ("0",), "critic": ("0",)}), Log()
    await asyncio.gather(*(hold(devices, role, log) for role in ("engine", "policy", "critic", "engine")))
    assert log.lines == [f"{role} {move}" for role in ("engine", "policy", "critic", "engine") for move in ("in", "out")]


async def test_roles_on_other_gpus_and_on_the_cpu_do_not_wait() -> None:
    devices, log = DeviceMap({"policy": ("0", "1"), "engine": ("2", "3"), "reward": ("cpu",), "judge": ("cpu",)}), Log()
    until = asyncio.Event()
    holders = [asyncio.create_task(hold(devices, role, log, until=until)) for role in ("policy", "engine", "reward", "judge")]
    holders.append(asyncio.create_task(hold(devices, "judge", log, until=until)))
    await settle()
    assert sorted(log.lines) == ["engine in", "judge in", "judge in", "policy in", "reward in"]
    until.set()
    await asyncio.gather(*holders)


async def test_partial_overlap_waits_and_is_not_overtaken_by_those_who_came_later() -> None:
    devices, log = DeviceMap({"left": ("0",), "right": ("1",), "both": ("0", "1")}), Log()
    until = asyncio.Event()
    first = asyncio.create_task(hold(devices, "left", log, until=until))
    await asyncio.sleep(0)
    others = [asyncio.create_task(hold(devices, role, log)) for role in ("both", "right")]
    await settle()
    assert log.lines == ["left in"]
    until.set()
    await asyncio.gather(first, *others)
    assert log.lines == ["left in", "left out", "both in", "both out", "right in", "right out"]


async def test_hooks_run_only_when_a_device_changes_hands() -> None:
    devices, log = DeviceMap({"policy": ("0",), "engine": ("0",), "other": ("1",)}), Log()
    for role in ("policy", "engine", "other"):
        devices.set_hooks(role, on_enter=log.hook(f"{role} moves in"), on_leave=log.hook(f"{role} moves out"))
    for role in ("engine", "engine", "policy", "other", "policy", "engine"):
        async with devices.lease(role):
            pass
    assert log.lines == [
        "policy moves out [0]",  # Workers are built on their devices: the first to take one sends the others away.
        "engine moves out [0]",
        "policy moves in [0]",
        "policy moves out [0]",
        "engine moves in [0]",
    ]


async def test_an_engine_goes_on_with_the_workers_whose_devices_nobody_took_and_grows_back() -> None:
    gpus = tuple(map(str, range(8)))
    devices, log = DeviceMap({"policy": gpus[:4], "engine": gpus}, independent=["engine"]), Log()
    for role in ("policy", "engine"):
        devices.set_hooks(role, on_enter=log.hook(f"{role} in"), on_leave=log.hook(f"{role} out"))
    async with devices.lease("engine"):
        pass
    async with devices.lease("policy"):
        pass
    assert log.lines[-1] == "policy in [0, 1, 2, 3]", "it grows back when it asks for its devices, not before"
    async with devices.lease("engine"):
        pass
    assert log.lines == [
        "policy out [0, 1, 2, 3]",
        "engine out [0, 1, 2, 3]",
        "policy in [0, 1, 2, 3]",
        "policy out [0, 1, 2, 3]",
        "engine in [0, 1, 2, 3]",
    ]


async def test_workers_that_work_together_leave_together_though_one_device_is_wanted() -> None:
    devices, log = DeviceMap({"policy": ("0", "1"), "critic": ("1",)}), Log()
    devices.set_hooks("policy", on_enter=log.hook("policy in"), on_leave=log.hook("policy out"))
    assert devices.evicted("policy", by="critic") == (0, 1)
    async with devices.lease("critic"):
        assert log.lines == ["policy out [0, 1]"]
    async with devices.lease("policy"):
        pass
    assert log.lines == ["policy out [0, 1]", "policy in [0, 1]"]


async def test_a_worker_that_spans_devices_leaves_when_one_of_them_is_taken() -> None:
    engines = (("0", "1"), ("2", "3"), ("4", "5"))
    devices, log = DeviceMap({"policy": ("1", "2"), "engine": engines}, independent=["engine"]), Log()
    devices.set_hooks("engine", on_enter=log.hook("engine in"), on_leave=log.hook("engine out"))
    assert devices.evicted("engine", by="policy") == (0, 1)
    async with devices.lease("policy"):
        assert log.lines == ["engine out [0, 1]"]


async def test_two_that_take_a_third_ones_devices_at_once_send_it_away_once() -> None:
    devices, log = DeviceMap({"left": ("0",), "right": ("1",), "both": ("0", "1")}), Log()
    devices.set_hooks("both", on_enter=log.hook("both in"), on_leave=log.hook("both out"))
    await asyncio.gather(hold(devices, "left", log), hold(devices, "right", log))
    assert log.lines.count("both out [0, 1]") == 1
    assert log.lines[0] == "both out [0, 1]"


async def test_a_role_that_leaves_frees_its_memory_down_to_its_residue() -> None:
    """Three fake roles count bytes on one device."""
    residue, whole = {"policy": 10, "engine": 20, "critic": 5}, {"policy": 70, "engine": 60, "critic": 50}
    held = dict(whole)
    devices = DeviceMap(dict.fromkeys(whole, ("0",)))
    peaks: list[int] = []

    def mover(role: str, sizes: dict[str, int]) -> Callable[[tuple[int, ...]], Awaitable[None]]:
        async def move(ranks: tuple[int, ...]) -> None:
            held[role] = sizes[role]
            peaks.append(sum(held.values()))

        return move

    for role in whole:
        devices.set_hooks(role, on_enter=mover(role, whole), on_leave=mover(role, residue))
    for role in ("engine", "policy", "critic", "policy", "engine"):
        async with devices.lease(role):
            assert held == {**residue, role: whole[role]}
    assert max(peaks[2:]) == 70 + 20 + 5, "who comes waits until the one before has gone"


async def test_a_cancelled_ask_and_a_failed_holder_leave_the_devices_free() -> None:
    devices, log = DeviceMap({"policy": ("0",), "engine": ("0",)}), Log()

    async def fail() -> None:
        async with devices.lease("policy"):
            await asyncio.sleep(0.01)
            raise RuntimeError("broken")

    failing = asyncio.create_task(fail())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(hold(devices, "engine", log))
    last = asyncio.create_task(hold(devices, "policy", log))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(RuntimeError, match="broken"):
        await failing
    await asyncio.wait_for(last, 60)
    assert log.lines == ["policy in", "policy out"]


@given(st.integers(0, 2**32))
def test_no_gpu_is_ever_held_twice_and_everyone_gets_a_turn(seed: int) -> None:
    chance = random.Random(seed)
    roles = {f"role{index}": tuple(map(str, chance.sample(range(4), chance.randint(1, 3)))) for index in range(4)}
    devices = DeviceMap(roles)
    held: set[str] = set()
    turns = 0

    async def take(role: str) -> None:
        nonlocal turns
        async with devices.lease(role):
            assert not held & set(roles[role])
            held.update(roles[role])
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
            held.difference_update(roles[role])
            turns += 1

    async def run() -> None:
        await asyncio.wait_for(asyncio.gather(*(take(chance.choice(list(roles))) for _ in range(20))), 60)

    asyncio.run(run())
    assert turns == 20


@given(st.integers(0, 2**32))
def test_whoever_holds_a_lease_is_alone_on_its_devices_and_hooks_tell_the_truth(seed: int) -> None:
    chance = random.Random(seed)
    roles = {f"role{index}": tuple(map(str, chance.sample(range(5), chance.randint(1, 4)))) for index in range(4)}
    devices = DeviceMap(roles, independent=[role for role in roles if chance.random() < 0.5])
    present = {role: set(range(len(seats))) for role, seats in roles.items()}

    def move(role: str, *, enters: bool) -> Callable[[tuple[int, ...]], Awaitable[None]]:
        async def moved(ranks: tuple[int, ...]) -> None:
            await asyncio.sleep(0)
            assert ranks
            assert present[role].isdisjoint(ranks) if enters else present[role].issuperset(ranks)
            present[role].symmetric_difference_update(ranks)

        return moved

    for role in roles:
        devices.set_hooks(role, on_enter=move(role, enters=True), on_leave=move(role, enters=False))

    async def take(role: str) -> None:
        async with devices.lease(role):
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
                assert len(present[role]) == len(roles[role])
                others = [roles[other][rank] for other in roles if other != role for rank in present[other]]
                assert not set(others) & set(roles[role])

    async def run() -> None:
        await asyncio.wait_for(asyncio.gather(*(take(chance.choice(list(roles))) for _ in range(20))), 60)

    asyncio.run(run())
