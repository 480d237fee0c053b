"""Every runtime passes these; `local` is the oracle of `processes` and `ray`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from runtime_probe import LoudProbe, Probe

from reroll.config.parts import LocalRuntimeConfig, ProcessesRuntimeConfig
from reroll.errors import ConfigError, ModelError, RerollError, WorkerDied, WorkerError, WorkerTimeout
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, Runtime, WorkerInfo
from reroll.tokens.batch import pack
from reroll.types import Sample
from reroll_zoo.ray.config import RayRuntimeConfig


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    ray.init("local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


CONFIGS = {
    "local": LocalRuntimeConfig(),
    "processes": ProcessesRuntimeConfig(kind="processes"),
    "ray": RayRuntimeConfig(kind="ray"),
}


@pytest.fixture(params=CONFIGS)
async def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runtime]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    async with make_runtime(CONFIGS[request.param]) as made:
        yield made


@pytest.fixture(params=["processes", "ray"])
async def apart(request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
    """A runtime whose workers are processes."""
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    async with make_runtime(CONFIGS[request.param]) as made:
        yield made


def on_cpu(num_workers: int, *, concurrency: int = 1) -> Placement:
    return Placement("probe", ("cpu",) * num_workers, concurrency)


async def test_a_worker_knows_its_role_rank_world_and_device(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(2))
    assert workers.size == 2
    assert await workers.broadcast(Probe.whoami) == [WorkerInfo("probe", rank, 2, "cpu") for rank in range(2)]


async def test_calls_take_arguments_by_place_and_name_and_answer_in_rank_order(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(3))
    assert await workers.broadcast(Probe.add, 1, 2, scale=10) == [30, 31, 32]
    assert await workers.one(2, Probe.add, 5, right=5) == 12
    assert await workers.scatter(Probe.double, [7, 8, 9]) == [14, 16, 18]


async def test_scatter_refuses_another_number_of_shards(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(2))
    with pytest.raises(ValueError, match="one shard per worker: got 3 shards for 2 workers"):
        await workers.scatter(Probe.double, [1, 2, 3])


async def test_calls_to_several_may_be_awaited_one_by_one(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(2))
    first, second = workers.scatter(Probe.double, [4, 5])
    assert (await second, await first) == (10, 8)
    with pytest.raises(ValueError, match="one shard per worker: got 1 shards for 2 workers"):
        workers.scatter(Probe.double, [1])


async def test_a_subclass_answers_with_its_own_method(runtime: Runtime) -> None:
    workers = await runtime.spawn(LoudProbe, on_cpu(1))
    assert await workers.one(0, Probe.double, 2) == 400


async def test_an_exception_arrives_with_the_workers_own_traceback(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(2))
    with pytest.raises(WorkerError) as caught:
        await workers.one(1, Probe.fail, "some key")
    message = str(caught.value)
    assert "KeyError in worker probe[1]: 'some key'" in message
    assert "_fail_deep_inside" in message
    assert "raise KeyError(kind)" in message


@pytest.mark.parametrize(("kind", "type_"), [("model", ModelError), ("config", ConfigError)])
async def test_our_own_errors_keep_their_type_and_carry_the_traceback_as_a_note(
    runtime: Runtime, kind: str, type_: type[RerollError]
) -> None:
    workers = await runtime.spawn(Probe, on_cpu(1))
    with pytest.raises(type_) as caught:
        await workers.broadcast(Probe.fail, kind)
    assert "_fail_deep_inside" not in str(caught.value)
    notes = "\n".join(caught.value.__notes__)
    assert "worker probe[0]" in notes
    assert "_fail_deep_inside" in notes
    if isinstance(caught.value, ConfigError):
        assert caught.value.violations[0].fix == "raise it"


async def test_an_exception_that_cannot_be_pickled_still_arrives(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(1))
    with pytest.raises(RerollError) as caught:
        await workers.one(0, Probe.fail, "unpicklable")
    assert "a and b" in str(caught.value)


async def test_sys_exit_in_a_worker_is_an_error_and_not_an_exit(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(1))
    with pytest.raises(WorkerError, match="SystemExit"):
        await workers.one(0, Probe.fail, "exit")
    assert await workers.one(0, Probe.double, 1) == 2


async def test_all_calls_are_awaited_before_the_first_error_is_raised(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(2, concurrency=2))
    with pytest.raises(WorkerError, match="doomed at once"):
        await workers.scatter(Probe.fail_if, [True, False])
    assert await workers.one(1, Probe.memory) == [1]


async def test_a_worker_with_concurrency_one_runs_calls_in_the_order_they_were_made(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(1))
    await asyncio.gather(*(workers.one(0, Probe.remember, value) for value in range(20)))
    assert await workers.one(0, Probe.memory) == list(range(20))


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_worker_serves_as_many_calls_at_once_as_it_was_placed_with(runtime: Runtime, concurrency: int) -> None:
    workers = await runtime.spawn(Probe, on_cpu(1, concurrency=concurrency))
    await asyncio.gather(*(workers.one(0, Probe.meet, concurrency) for _ in range(6)))
    assert await workers.one(0, Probe.most_met) == concurrency


async def test_batches_and_tensors_travel(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(2))
    rows = [
        Sample(
            ids=np.arange(length),
            loss_mask=np.arange(length) > 1,
            logp=np.full(length, -0.5, np.float32),
            turn=np.where(np.arange(length) > 1, 0, -1),
        )
        for length in (4, 6)
    ]
    batch = pack(rows)
    returned = await workers.broadcast(Probe.tokens, batch)
    for back in returned:
        assert torch.equal(back.ids, batch.ids)
        assert back.num_loss_tokens == batch.num_loss_tokens
        assert back.old_logp is not None
        assert torch.equal(back.old_logp, batch.logp * 2)
    weights = {"w": torch.ones(1_000_000)}
    assert await workers.broadcast(Probe.weigh, weights) == [1e6, 1e6]


async def test_stop_closes_each_worker_once_and_may_be_called_again(runtime: Runtime, tmp_path: Path) -> None:
    workers = await runtime.spawn(Probe, on_cpu(2), tmp_path)
    await workers.stop()
    await workers.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-0", "closed-1"]
    with pytest.raises(WorkerError, match=r"probe\[0\] was stopped"):
        await workers.one(0, Probe.double, 1)


async def test_closing_the_runtime_closes_its_workers_and_may_be_called_again(runtime: Runtime, tmp_path: Path) -> None:
    await runtime.spawn(Probe, on_cpu(1), tmp_path)
    await runtime.close()
    await runtime.close()
    assert (tmp_path / "closed-0").exists()


async def test_stopping_a_stuck_worker_does_not_take_long(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{type(runtime).__module__}.STOP_TIMEOUT_S", 0.2)
    workers = await runtime.spawn(Probe, on_cpu(1))
    stuck = asyncio.ensure_future(workers.one(0, Probe.hang))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(workers.stop(), 30)  # Half as long as it hangs.
    stuck.cancel()


async def test_a_worker_that_cannot_be_built_is_reported_and_the_others_are_closed(runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        await runtime.spawn(Probe, on_cpu(2), tmp_path, fail_on=1)
    assert "ZeroDivisionError in worker probe[1]: no such model file" in str(caught.value)
    assert "raise ZeroDivisionError" in str(caught.value)
    assert (tmp_path / "closed-0").exists()


async def test_a_killed_worker_is_reported_as_died_with_the_way_out(apart: Runtime) -> None:
    workers = await apart.spawn(Probe, on_cpu(2))
    with pytest.raises(WorkerDied, match=r"probe\[1\] is gone.*--resume"):
        await workers.one(1, Probe.die)
    assert await workers.one(0, Probe.double, 3) == 6
    with pytest.raises(WorkerDied, match=r"probe\[1\]"):
        await workers.broadcast(Probe.double, 3)


async def test_a_restarted_worker_is_built_anew_as_it_was_spawned(runtime: Runtime, tmp_path: Path) -> None:
    workers = await runtime.spawn(Probe, on_cpu(2), tmp_path)
    await workers.broadcast(Probe.remember, 1)
    await workers.restart(1)
    assert await workers.broadcast(Probe.memory) == [[1], []]
    assert await workers.broadcast(Probe.whoami) == [WorkerInfo("probe", rank, 2, "cpu") for rank in range(2)]
    await workers.stop()
    assert (tmp_path / "closed-1").exists()


async def test_a_killed_worker_can_be_restarted(apart: Runtime) -> None:
    workers = await apart.spawn(Probe, on_cpu(2))
    with pytest.raises(WorkerDied):
        await workers.one(1, Probe.die)
    await workers.restart(1)
    assert await workers.broadcast(Probe.double, 3) == [6, 6]


async def test_a_worker_that_overruns_its_time_is_built_anew(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{type(runtime).__module__}.STOP_TIMEOUT_S", 0.2)
    workers = await runtime.spawn(Probe, on_cpu(2))
    await workers.broadcast(Probe.remember, 1)
    assert await workers.one_within(30, 1, Probe.double, 3) == 6
    overrun = asyncio.ensure_future(workers.one_within(1.0, 1, Probe.hang))
    await asyncio.sleep(0.05)
    behind = asyncio.ensure_future(workers.one(1, Probe.double, 3))
    with pytest.raises(WorkerTimeout, match=r"Probe.hang took longer than 1 s"):
        await overrun
    with pytest.raises(WorkerDied, match=r"probe\[1\]"):
        await behind
    assert await workers.broadcast(Probe.memory) == [[1], []]


async def test_workers_that_are_stopped_at_once_are_not_waited_for_nor_closed(runtime: Runtime, tmp_path: Path) -> None:
    workers = await runtime.spawn(Probe, on_cpu(2), tmp_path)
    stuck = asyncio.ensure_future(workers.one(1, Probe.hang))
    behind = asyncio.ensure_future(workers.one(1, Probe.double, 3))
    await asyncio.sleep(0.05)
    await workers.stop(at_once=True)
    await workers.stop()
    with pytest.raises(WorkerDied, match=r"probe\[1\]"):
        await behind
    with pytest.raises(WorkerError, match="takes no more calls"):
        await workers.one(0, Probe.double, 3)
    assert not list(tmp_path.glob("closed-*"))
    stuck.cancel()


async def test_calls_that_overrun_together_build_their_worker_anew_once(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(1, concurrency=2))
    overrun = await asyncio.gather(*(workers.one_within(0.2, 0, Probe.nap) for _ in range(2)), return_exceptions=True)
    assert WorkerTimeout in map(type, overrun)
    assert {type(outcome) for outcome in overrun} <= {WorkerTimeout, WorkerDied}
    assert await workers.one(0, Probe.double, 1) == 2


@pytest.mark.usefixtures("one_ray")
async def test_what_several_actors_are_given_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[object] = []
    put = ray.put
    async with make_runtime(RayRuntimeConfig(kind="ray")) as runtime:
        workers = await runtime.spawn(Probe, on_cpu(4))  # Which load no torch, as they are given none of its tensors.
        monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
        left, right = {"w": np.ones(2)}, {"w": np.ones(3)}
        assert await workers.scatter(Probe.weigh, [left, left, right, right]) == [2, 2, 3, 3]
    assert [arguments for (arguments,), _ in stored] == [left, right]  # type: ignore[misc,attr-defined]


def test_auto_devices_are_the_cpu_and_an_index_stays_one(runtime: Runtime) -> None:
    assert runtime.num_gpus == 0
    assert runtime.devices("auto") == ("cpu",)
    assert runtime.devices("0-1") == ("0", "1")


async def test_only_local_workers_share_memory(runtime: Runtime) -> None:
    workers = await runtime.spawn(Probe, on_cpu(1))
    assert (await workers.one(0, Probe.memory) is await workers.one(0, Probe.memory)) == runtime.shares_memory
