"""An engine whose process is killed while it writes: the others take over its samples, and the run is the same."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from reroll.config.load import parse_config
from reroll.config.parts import ProcessesRuntimeConfig
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.worker import InferWorker
from reroll.observe.journal import SampleState, read_journal
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement
from reroll.types import Completion, Request, SamplingParams
from reroll_zoo.ray.config import RayRuntimeConfig
from reroll_zoo.tiny_models import make_tiny


class MortalWorker(InferWorker):
    """An engine that tells where it can be killed."""

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def one_ray() -> Any:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    return request.param


async def test_what_a_killed_engine_was_writing_goes_on_at_another_as_it_would_have_from_the_last_token_told(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(make_tiny(tmp_path / "model"))
    prompts = [(5 + i, 9, 30) for i in range(16)]

    def ask(i: int) -> Request:
        return Request(id=str(i), prompt_ids=prompts[i], sampling=SamplingParams(max_tokens=400, min_tokens=400, seed=i))

    config = RayRuntimeConfig(kind="ray") if kind == "ray" else ProcessesRuntimeConfig(kind="processes")
    async with make_runtime(config) as runtime:
        place = Placement("engine", ("cpu", "cpu"), concurrency=CONCURRENCY)
        workers = await runtime.spawn(MortalWorker, place, model=folder, precision="fp32", max_running=8)
        cluster = InferCluster(workers)  # type: ignore[arg-type]
        undisturbed = await asyncio.gather(*(cluster.generate(ask(i)) for i in range(16)))
        pids, before = await workers.broadcast(MortalWorker.pid), await workers.broadcast(MortalWorker.stats)
        tasks = [asyncio.create_task(cluster.generate(ask(i))) for i in range(16)]
        while not (mortal := [one for one in cluster._pending.values() if one.worker.rank == 0]) or any(
            one.partial.num_tokens < 64 for one in mortal
        ):
            await asyncio.sleep(0.005)
        os.kill(pids[0], signal.SIGKILL)
        done = await asyncio.gather(*tasks)
        after = await workers.one(1, MortalWorker.stats)
        await cluster.close()
    [(_, num_moved, num_told)] = [record.args for record in caplog.records if "is gone" in record.message]
    assert num_moved == 8
    assert num_told >= 8 * 64
    assert after.num_tokens - before[1].num_tokens == 16 * 400 - num_told
    assert [completion.token_ids for completion in done] == [completion.token_ids for completion in undisturbed]


@pytest.mark.parametrize("kind", ["processes", pytest.param("ray", marks=pytest.mark.slow)], indirect=True)
def test_a_run_that_loses_an_engine_goes_on_and_trains_every_sample_once(
    rlvr_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole = run(rlvr_tree, name="whole")  # In this process, by one engine: however many there are, the curve is the same.
    rlvr_tree["runtime"] = {"kind": kind}
    rlvr_tree["engine"]["num_workers"] = 2
    num_asked = 0

    whole_generate = InferCluster.generate

    async def generate(self: InferCluster, *args: Any) -> Completion:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 40:  # In the midst of the second step, after the evaluation's ten.
            if kind == "ray":
                ray.kill(self._workers._actors[0]._actor)  # type: ignore[attr-defined]
            else:
                self._workers._processes[0]._child.kill()  # type: ignore[attr-defined]
        completion: Completion = await whole_generate(self, *args)
        return completion

    monkeypatch.setattr(InferCluster, "generate", generate)
    monkeypatch.setattr("reroll.infer.cluster.MAX_RESTARTS", 0)
    killed = run(rlvr_tree, name="killed")
    assert [row["engine/alive"] for row in rows(killed)] == [2, 1, 1]
    assert [row["reward/mean"] for row in rows(killed)] == pytest.approx([row["reward/mean"] for row in rows(whole)], abs=1e-6)
    assert set(trained(killed).values()) == {1}
    assert trained(killed) == trained(whole)


def run(tree: dict[str, Any], *, name: str) -> Outcome:
    tree["run"]["name"] = name
    folder = Path(tree["run"]["runs_dir"]).parent
    return train(parse_config(tree, folder=folder), code_folder=folder)


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if "train/loss" in row]


def trained(outcome: Outcome) -> dict[str, int]:
    """How often each sample was trained on."""
    events = read_journal(outcome.folder / "journal")
    return collections.Counter(event.sample_id for event in events if event.state is SampleState.TRAINED)
