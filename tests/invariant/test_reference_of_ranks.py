"""A reference that several ranks hold follows their policy as one process's does: the same numbers, to the bit."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_bench import batch, fsdp2, model_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.config.parts import LocalRuntimeConfig, ModelConfig, ProcessesRuntimeConfig, RuntimeConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import WorkerError
from reroll.pipeline.run import train
from reroll.pipeline.spawn import reference_of, spawn_model
from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, WorkerInfo
from reroll.training import cluster as cluster_module
from reroll.training.cluster import FollowJob, PartShape, TrainCluster
from reroll_zoo.ray.config import RayRuntimeConfig
from reroll_zoo.tiny_models import make_tiny

RUNTIMES: dict[str, RuntimeConfig] = {
    "local": LocalRuntimeConfig(),
    "processes": ProcessesRuntimeConfig(kind="processes"),
    "ray": RayRuntimeConfig(kind="ray", num_cpus=16),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape, with other weights."""
    root = tmp_path_factory.mktemp("models")
    start, other = (make_tiny(root / str(seed), family="qwen3", hidden=32, seed=seed) for seed in (1, 2))
    return start, other


async def moved(policy: TrainCluster, reference: TrainCluster, folder: Path) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The reference's weights after each of three moves, the second of which is taken back from a checkpoint, and what it
    then says."""
    found = []
    await reference.logprobs(batch(8))  # What was gathered for an earlier pass must not be seen again.
    for share in (0.3, 0.125, 1.0):
        await reference.follow(policy, share=share)
        if share == 0.125:
            await reference.save(folder)
            await reference.follow(policy, share=0.5)
            await reference.load(folder)
        found.append({name: tensor.clone() for name, tensor in (await reference.weights(frozen=True)).items()})
    return found, await reference.logprobs(batch(9))


LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "two shards": ("processes", "fp32", {"num_ranks": 2}),
    "two shards in bf16": ("ray", "bf16", {"num_ranks": 2}),
    "two replicas of two split layers": ("processes", "fp32", {"num_ranks": 4, "replicas": 2, "tp": 2}),
}


@pytest.mark.parametrize("layout", ["two shards", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[1:])])
def test_it_moves_as_the_reference_of_one_process_does(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(cluster_module, "BUCKET_BYTES", 20_000)  # Several buckets, and weights that are larger than one.
    kind, precision, options = LAYOUTS[layout]
    start, other = models

    async def play(kind: str, config: ModelConfig) -> tuple[list[dict[str, Tensor]], Tensor]:
        async with make_runtime(RUNTIMES[kind]) as runtime:
            policy = await spawn_model(runtime, config, role="policy", total_steps=6)
            reference = await reference_of(runtime, config, policy, model=str(other))
            return await moved(policy, reference, tmp_path / kind)

    ours, said = asyncio.run(play(kind, model_config(start, fsdp2(precision=precision, **options))))
    expected, should_say = asyncio.run(play("local", model_config(start, TorchStrategyConfig(precision=precision))))
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, weight in theirs.items():
            assert torch.equal(mine[name], weight), name
    embeddings = [weights["model.embed_tokens.weight"] for weights in expected]
    assert not any(torch.equal(one, next_one) for one, next_one in pairwise(embeddings))
    tolerance = 1e-5 if precision == "fp32" else 0.05
    torch.testing.assert_close(said, should_say, rtol=tolerance, atol=tolerance)


class Holder:
    """Holds one number in a process of its own. With `breaks`, the first fails when asked, and the second waits."""

    def __init__(self, info: WorkerInfo, *, breaks: bool) -> None:
        self._rank, self._breaks = info.rank, breaks

    def part_shapes(self) -> dict[str, PartShape]:
        return {"number": PartShape((1,), torch.float32)}

    def parts(self, wanted: Mapping[str, PartShape]) -> dict[str, Tensor]:
        if self._breaks and self._rank == 0:
            raise ZeroDivisionError("the first rank cannot go on")
        if self._breaks:
            time.sleep(600)
        return {name: torch.ones(1) for name in wanted}

    def follow(self, job: FollowJob) -> None:
        pass


def test_a_policy_that_breaks_while_it_is_followed_is_ended_and_its_reference_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever ended the reference instead would then wait for ranks of the policy that wait for each other."""
    monkeypatch.setattr(cluster_module, "GRACE_S", 1.0)

    async def play() -> None:
        async with make_runtime(RUNTIMES["processes"]) as runtime:
            roles = [Placement(role, ("cpu", "cpu")) for role in ("policy", "reference")]
            held = [await runtime.spawn(Holder, role, breaks=role.role == "policy") for role in roles]
            policy, reference = (TrainCluster(workers) for workers in held)  # type: ignore[arg-type]
            with pytest.raises(WorkerError, match="the first rank cannot go on"):
                await asyncio.wait_for(reference.follow(policy, share=0.5), timeout=120)
            await reference.follow(reference, share=0.5)
            with pytest.raises(WorkerError, match="was stopped"):
                await policy.follow(reference, share=0.5)

    asyncio.run(play())


@pytest.mark.slow
def test_a_whole_run_of_two_ranks_has_the_references_of_the_local_run_and_goes_on_with_them(
    rlvr_tree: dict[str, Any],
) -> None:
    folder = Path(rlvr_tree["run"]["runs_dir"]).parent
    rlvr_tree["data"]["eval"] = []
    rlvr_tree |= {"kl": {"coef": 0.05}, "reference": {"sync_every": 2, "mix": 0.5}, "checkpoint": {"every": 1, "keep": 9}}

    def run(name: str, strategy: dict[str, Any], *, steps: int = 4, resume: bool = False) -> tuple[list[float], Path]:
        tree = copy.deepcopy(rlvr_tree)
        tree["run"] |= {"name": name, "steps": steps}
        tree["policy"]["strategy"] = strategy
        tree["runtime"] = {"kind": "local" if strategy["kind"] == "torch" else "processes"}
        outcome = train(parse_config(tree, folder=folder), code_folder=folder, resume=resume)
        rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
        return [row["kl/reference"] for row in rows if "kl/reference" in row], outcome.checkpoint

    expected, alone = run("alone", {"kind": "torch"})
    run("ranks", {"kind": "fsdp2", "num_ranks": 2}, steps=3)
    found, ranks = run("ranks", {"kind": "fsdp2", "num_ranks": 2}, resume=True)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert max(expected) > 1e-5
    for part in ("", "reference"):
        ours, theirs = (AutoModelForCausalLM.from_pretrained(path / part).state_dict() for path in (ranks, alone))
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-4)
