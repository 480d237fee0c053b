"""Supervised fine-tuning: the same batches, strategy and loop; the loss is on the answers."""

from __future__ import annotations

from typing import Any

from reroll.config.tree import SftConfig
from reroll.data.sampler import Sampler
from reroll.observe.metrics import Last, Stats, Sum
from reroll.pipeline.base import Pipeline, RunContext
from reroll.tokens.batch import pack
from reroll.train.cluster import TrainCluster
from reroll.train.loss import SFT_LOSS
from reroll.types import Sample

SHOWN = {f"train/{name}" for name in ("loss", "grad_norm", "lr", "loss_tokens", "tokens_per_s")}


class SftPipeline(Pipeline[SftConfig]):
    """Draw rows, take one optimizer step."""

    def __init__(
        self, config: SftConfig, context: RunContext, policy: TrainCluster, rows: Sampler[Sample], held_out: list[Sample]
    ) -> None:
        super().__init__(config, context)
        self.policy = policy
        self.rows = rows
        self.held_out = held_out

    async def step(self, step: int) -> Stats:
        batch = pack([self.rows.next() for _ in range(self.config.rows_per_step)])
        trained = await self.policy.train(batch, SFT_LOSS, seed=step)
        # Nobody sampled these tokens: what compares the policy with a sampler says nothing here.
        told = {name: metric for name, metric in trained.items() if name in SHOWN or name.startswith("time/")}
        return Stats(told) + Stats({"tokens": Sum(float(batch.num_tokens))})

    async def start(self, num_steps: int) -> None:
        return None

    async def finish(self) -> None:
        return None

    async def evaluate(self) -> Stats:
        if not self.held_out:
            return Stats()
        batch = pack(self.held_out)
        logp = await self.policy.logprobs(batch)
        return Stats({"eval/loss": Last(-float(logp.sum()) / batch.num_loss_tokens)})

    def is_eval_due(self, num_steps: int) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.rows.restore(state["rows"])
