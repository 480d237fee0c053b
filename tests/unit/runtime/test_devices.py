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

    def hook(self, line: str) -> Callable[[], Awaitable[None]]:
        async def note() -> None:
            await asyncio.sleep(0)
            self.lines.append(line)

        return note


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
    await asyncio.sleep(0.01)
    assert sorted(log.lines) == ["engine in", "judge in", "judge in", "policy in", "reward in"]
    until.set()
    await asyncio.gather(*holders)


async def test_partial_overlap_waits_and_is_not_overtaken_by_those_who_came_later() -> None:
    devices, log = DeviceMap({"left": ("0",), "right": ("1",), "both": ("0", "1")}), Log()
    until = asyncio.Event()
    first = asyncio.create_task(hold(devices, "left", log, until=until))
    await asyncio.sleep(0)
    others = [asyncio.create_task(hold(devices, role, log)) for role in ("both", "right")]
    await asyncio.sleep(0.01)
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
        "engine moves in",
        "engine moves out",
        "policy moves in",
        "other moves in",
        "policy moves out",
        "engine moves in",
    ]


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
    await asyncio.wait_for(last, 1)
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
        await asyncio.wait_for(asyncio.gather(*(take(chance.choice(list(roles))) for _ in range(20))), 5)

    asyncio.run(run())
    assert turns == 20
