"""Supervised fine-tuning: the same batches, strategy and loop; the loss is on the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from reroll.config.offline import OfflineConfig, SftConfig
from reroll.data.sampler import Sampler
from reroll.data.sources import load_conversations
from reroll.errors import DataError
from reroll.models.load import load_tokenizer
from reroll.observe.metrics import Last, Stats
from reroll.pipeline.base import RunContext
from reroll.pipeline.offline import OfflinePipeline
from reroll.pipeline.spawn import spawn_model
from reroll.runtime import make_runtime
from reroll.tokens.batch import Batch, pack
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.train.loss import SFT_LOSS
from reroll.types import Sample

SHOWN = {f"train/{name}" for name in ("loss", "grad_norm", "lr", "loss_tokens", "tokens_per_s")}


class SftPipeline(OfflinePipeline[SftConfig, Sample]):
    """Imitate the rows."""

    loss = SFT_LOSS

    async def batch_of(self, rows: Sequence[Sample]) -> Batch:
        return pack(rows)

    async def measure(self, batch: Batch) -> Stats:
        logp = await self.policy.logprobs(batch)
        return Stats({"loss": Last(-float(logp.sum()) / batch.num_loss_tokens)})

    async def step(self, step: int) -> Stats:
        # Nobody sampled these tokens: what compares the policy with a sampler says nothing here.
        told = await super().step(step)
        return Stats({name: told[name] for name in told if name in SHOWN or name == "tokens" or name.startswith("time/")})


@asynccontextmanager
async def open_sft(config: SftConfig, context: RunContext, code_folder: Path) -> AsyncIterator[SftPipeline]:
    """Tokenise every row before the model is loaded: a bad one ends the run at once."""
    rows, held_out = load_imitation_rows(config)
    async with make_runtime(config.runtime) as runtime:
        policy = await spawn_model(runtime, config.policy, role="policy", total_steps=config.run.steps)
        yield SftPipeline(config, context, policy, rows, held_out)


def load_imitation_rows(config: OfflineConfig) -> tuple[Sampler[Sample], list[Sample]]:
    """The conversations of `config.data` as rows with the loss on the answers: to train on, and held out."""
    renderer = Renderer(load_tokenizer(config.policy.model))
    sources = [(_rows(config, renderer, index), source.weight) for index, source in enumerate(config.data.train)]
    held_out = [sample for index in range(len(config.data.eval)) for sample in _rows(config, renderer, index, held_out=True)]
    return Sampler(sources, seed=config.run.seed, shuffle=config.data.shuffle), held_out


def _rows(config: OfflineConfig, renderer: Renderer, index: int, *, held_out: bool = False) -> list[Sample]:
    source = (config.data.eval if held_out else config.data.train)[index]
    where = f"data.{'eval' if held_out else 'train'}.{index}"
    samples = []
    for number, conversation in enumerate(load_conversations(source), start=1):
        ids, mask = renderer.training_row(conversation)
        check_length(ids, config.max_tokens, where=f"{where}: row {number}")
        samples.append(sft_sample(ids, mask))
    return samples


def check_length(ids: Sequence[int], max_tokens: int, *, where: str) -> None:
    """A row that is too long is an error: cutting it would teach half an answer."""
    if len(ids) > max_tokens:
        raise DataError(f"{where} has {len(ids)} tokens, more than max_tokens {max_tokens}: raise max_tokens, or drop the row")
