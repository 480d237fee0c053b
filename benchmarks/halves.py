"""The halves of a step over one model, for benchmarks that compare models or settings: an engine writes, a trainer learns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpu_shapes import device_here
from gpu_work import Work

from reroll.config.parts import OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.batch import Batch, pack
from reroll.tokens.packing import micro_batches
from reroll.training.loss import PolicyLoss
from reroll.training.predict import repeat_cost
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Completion, Request, Sample, SamplingParams

LOSS = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2})
NUM_WORDS = 2000

Written = list[tuple[Request, Completion]]


class Writer:
    """An engine in bf16."""

    def __init__(self, folder: str, work: Work, *, notes_routes: bool = False) -> None:
        model = load_model(folder, dtype=torch.bfloat16, device=device_here())
        self._weights = dict(model.named_parameters())  # By the names that a push has.
        tokenizer = load_tokenizer(folder)
        self._engine = EmbeddedEngine(model, tokenizer, max_running=work.num_samples, notes_routes=notes_routes)
        self._work, self._version = work, 0

    def write(self) -> tuple[float, Written]:
        """Seconds, and all samples of a step; no prompt is known from the last."""
        requests = {request.id: request for request in requests_of(self._work)}
        done: dict[str, Completion] = {}
        started_s = clock()
        for request in requests.values():
            self._engine.submit(request)
        while self._engine.num_unfinished:
            done |= {finished.request_id: finished.completion for finished in self._engine.step()}
        took_s = clock() - started_s
        self._version += 1
        self._engine.load_weights(self._weights, version=self._version)
        return took_s, [(requests[name], completion) for name, completion in done.items()]


@dataclass(frozen=True, kw_only=True)
class Learned:
    seconds: float
    gap: float
    """Of trainer and engine: the mean over tokens."""
    gap_max: float
    routes_differ: float
    """Share of layers in which a token would have gone to other experts; nan if none were replayed."""


class Learner:
    """A trainer in bf16, whose steps are too small to move the weights: it stays equal to the engine."""

    def __init__(self, folder: str, *, micro_batch_tokens: int) -> None:
        config = TorchStrategyConfig(precision="bf16", micro_batch_tokens=micro_batch_tokens, logprob_chunk=micro_batch_tokens)
        model = load_model(folder, dtype=torch.bfloat16, device=device_here())
        self._strategy = TorchStrategy(model, load_tokenizer(folder), config, OptimConfig(lr=1e-12), total_steps=10_000)
        self._cost = repeat_cost(device_here(), "bf16") if self._strategy.merges_prefixes else 1.0
        self._most = micro_batch_tokens
        self.num_parameters = sum(weight.numel() for weight in model.parameters())

    def learn(self, batch: Batch) -> Learned:
        """One update."""
        started_s, found, weights = clock(), [], []
        for part in micro_batches(batch, max_tokens=self._most, repeat_cost=self._cost):
            found.append(self._strategy.forward_backward(part, LOSS).values_by_name())
            weights.append(int(part.loss_mask.sum()))
        self._strategy.optim_step()
        took_s = clock() - started_s

        def mean(name: str) -> float:
            return float(np.average([values.get(name, np.nan) for values in found], weights=weights))

        gap_max = max(values["sampler_gap_max"] for values in found)
        return Learned(seconds=took_s, gap=mean("sampler_gap"), gap_max=gap_max, routes_differ=mean("routes_differ"))


def requests_of(work: Work) -> Sequence[Request]:
    draw = np.random.default_rng(0)
    prompts = [tuple(draw.integers(10, NUM_WORDS, size=work.prompt_tokens).tolist()) for _ in range(work.prompts)]
    return [
        Request(
            id=f"{number}/{sibling}",
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=work.tokens, min_tokens=work.tokens, seed=number * work.siblings + sibling),
        )
        for number, prompt in enumerate(prompts)
        for sibling in range(work.siblings)
    ]


def batch_of(written: Written) -> Batch:
    """What was written, with advantages drawn at random, and with routes where the engine noted them."""
    batch = pack([_row(request, completion) for request, completion in written])
    by_row = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    return batch.replace(advantage=torch.where(batch.loss_mask, by_row[batch.sequence_index], 0.0))


def _row(request: Request, completion: Completion) -> Sample:
    num_before, num_written = len(request.prompt_ids), len(completion.token_ids)
    routes = completion.routes
    if routes is not None:  # The newest token was not read: where it goes is not known.
        unread = num_before + num_written - len(routes)
        routes = np.pad(routes, ((0, unread), (0, 0), (0, 0)), constant_values=np.iinfo(routes.dtype).max)
    return Sample(
        ids=np.array((*request.prompt_ids, *completion.token_ids)),
        loss_mask=np.arange(num_before + num_written) >= num_before,
        logp=np.array((*[0.0] * num_before, *completion.logprobs), dtype=np.float32),
        turn=np.array([-1] * num_before + [0] * num_written),
        routes=routes,
    )


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib() -> float:
    """Since the last `forget_peak`."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
