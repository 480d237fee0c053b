"""Rows that begin alike are trained together: the gradient is that of every row by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from reroll.config.parts import OptimConfig, PolicyConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.models.load import load_model
from reroll.runtime.base import WorkerInfo
from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import micro_batches
from reroll.training.base import Needs, required
from reroll.training.cluster import PredictJob, TrainWorker, train_jobs
from reroll.training.loss import PolicyLoss
from reroll.training.predict import predict
from reroll.types import Sample
from reroll_zoo.fused_layers import fuse_norms
from reroll_zoo.tiny_models import make_tiny

PPO = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2})
LARGEST_ERROR = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Of the largest entry of a gradient."""


def groups(*, num_groups: int = 3, group_size: int = 4, alike: bool = False) -> Batch:
    """Siblings, and an episode whose context grows. `alike`: siblings differ in their last token only."""
    rng = np.random.default_rng(0)
    rows, advantages = [], []
    for _ in range(num_groups):
        prompt, answer = rng.integers(4, 90, 24), rng.integers(4, 90, 12)
        drawn = rng.normal(size=group_size)
        for advantage in (drawn - drawn.mean()) / drawn.std():
            written = np.append(answer, rng.integers(4, 90)) if alike else rng.integers(4, 90, int(rng.integers(3, 16)))
            rows.append((prompt, written))
            advantages.append(advantage)
    context = rng.integers(4, 90, 10)
    for _ in range(0 if alike else 4):
        rows.append((context, rng.integers(4, 90, 5)))
        advantages.append(rng.normal())
        context = np.concatenate([*rows[-1], rng.integers(4, 90, 6)])
    packed = pack([sample(*row) for row in rows])
    per_row = torch.tensor(advantages, dtype=torch.float32)
    return packed.replace(advantage=torch.where(packed.loss_mask, per_row[packed.sequence_index], 0.0))


def sample(prompt: np.ndarray, written: np.ndarray) -> Sample:
    ids = np.concatenate([prompt, written])
    mask = np.arange(len(ids)) >= len(prompt)
    return Sample(ids=ids, loss_mask=mask, logp=np.where(mask, -4.0, 0.0).astype(np.float32), turn=np.where(mask, 0, -1))


def gradient(model: PreTrainedModel, parts: Sequence[Batch]) -> dict[str, Tensor]:
    model.zero_grad()
    for part in parts:
        PPO(part, predict(model, part, PPO.needs, chunk=64)).loss.backward()  # type: ignore[no-untyped-call]
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_gradient_is_that_of_every_row_alone(tmp_path: Path, family: Any, dtype: torch.dtype) -> None:
    model = load_model(str(make_tiny(tmp_path, family=family)), dtype=dtype, device="cpu")
    fuse_norms(model)  # Those of Hugging Face compute in fp32.
    if family == "gemma2" and dtype is torch.float64:
        pytest.skip("its norms compute in fp32")
    batch = groups()
    together = micro_batches(batch, max_tokens=120)
    assert 1 < len(together) < len(batch) / 2
    ours, expected = gradient(model, together), gradient(model, [batch.select([row]) for row in range(len(batch))])
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, each in expected.items():
        assert float((ours[name] - each).abs().max()) <= LARGEST_ERROR[dtype] * largest, name


def test_siblings_that_cancel_out_leave_the_rounding_of_what_cancelled(tmp_path: Path) -> None:
    """Advantages of a group sum to zero: where its rows are alike, so nearly does its gradient, and fp32 rounds its terms."""
    batch = groups(alike=True)
    alone = [batch.select([row]) for row in range(len(batch))]
    found = {}
    for dtype in LARGEST_ERROR:
        model = load_model(str(make_tiny(tmp_path / str(dtype))), dtype=dtype, device="cpu")
        fuse_norms(model)
        ours, expected = gradient(model, micro_batches(batch, max_tokens=120)), gradient(model, alone)
        largest = max(float(each.abs().max()) for each in expected.values())
        found[dtype] = max(float((ours[name] - each).abs().max()) for name, each in expected.items()) / largest
    assert found[torch.float64] < 1e-10
    assert found[torch.float32] < 1e-4


def worker(folder: Path, *, micro_batch_tokens: int) -> TrainWorker:
    strategy = TorchStrategyConfig(micro_batch_tokens=micro_batch_tokens)
    config = PolicyConfig(model=str(folder), strategy=strategy, optim=OptimConfig(lr=1e-3))
    return TrainWorker(WorkerInfo("policy", 0, 1, "cpu"), config, total_steps=10)


def test_a_worker_computes_what_rows_share_once_and_learns_the_same(tmp_path: Path) -> None:
    folder, batch = make_tiny(tmp_path), groups()
    seen: dict[int, int] = {}
    answers, norms = [], []
    for tokens in (1, 100_000):
        policy = worker(folder, micro_batch_tokens=tokens)
        counted: list[int] = []
        embedding = policy._strategy._model.get_input_embeddings()  # type: ignore[attr-defined]
        embedding.register_forward_hook(lambda module, args, output, counted=counted: counted.append(output.shape[1]))
        answers.append(required(policy.predict(PredictJob(batch, Needs())).logp))
        seen[tokens] = sum(counted)
        [job] = train_jobs(batch, PPO)
        norms.append(policy.train(job)["grad_norm"].value)
        assert sum(counted) == 2 * seen[tokens], "training computes as much as asking"
    assert seen[1] == batch.num_tokens
    distinct = {tuple(row[: end + 1]) for row in rows_of(batch) for end in range(len(row))}
    assert seen[100_000] == len(distinct)
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def rows_of(batch: Batch) -> list[list[int]]:
    bounds = batch.cu_seqlens.tolist()
    return [batch.ids[start:end].tolist() for start, end in pairwise(bounds)]
