"""One model over many processes, by DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.config.parts import OptimConfig
from reroll.models.load import without_adapter
from reroll.models.recurrent import is_recurrent
from reroll.observe.files import sync_files
from reroll.observe.metrics import Last, Max, Stats
from reroll.tokens.batch import Batch
from reroll.training.base import Loss, Needs, Predictions
from reroll.training.optimizer import diverged, learning_rate
from reroll.training.saved import read_state, readable, refuse_other_adapter, write_state, written_by_another
from reroll.training.torch_strategy import enable_gradient_checkpointing
from reroll_zoo.deepspeed.config import DeepspeedConfig
from reroll_zoo.deepspeed.engine import build_engine, fp32_state, gathered, set_fp32_state
from reroll_zoo.ranks.empty_model import PredictingModel
from reroll_zoo.ranks.group import DataParallelRanks
from reroll_zoo.ranks.sharded import ShardedStrategy

STATES_FOLDER, STEP_FILE = "zero", "step.pt"
"""Inside a checkpoint: what the optimizer goes on from."""


class DeepspeedStrategy(ShardedStrategy):
    """Trains a model whose optimizer state, gradients and, under stage 3, weights are cut up among all ranks.

    All ranks call every verb. `make_empty` gives the model without weights; the first rank brings them in `full`, on the
    host. AdamW works on fp32 masters, and gradients are summed over ranks and micro-batches in fp32.
    """

    def __init__(
        self,
        make_empty: Callable[[], PreTrainedModel],
        full: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        config: DeepspeedConfig,
        optim: OptimConfig,
        *,
        device: str,
        total_steps: int,
    ) -> None:
        self._make_empty, self._tokenizer, self._optim_config = make_empty, tokenizer, optim
        self._total_steps, self._step, self._device = total_steps, 0, torch.device(device)
        self._has_gradient = False
        self.data_parallel = DataParallelRanks(ranks_per_share=1)
        self._model = make_empty() if full is None else full
        self.merges_prefixes = not is_recurrent(self._model)
        if total_steps == 0:
            self._model.requires_grad_(False)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(self._model)
        root = PredictingModel(self._model, chunk=config.logprob_chunk)
        self._engine: Any = build_engine(root, config, optim, device=device, is_fixed=total_steps == 0)
        if total_steps > 0:
            self._optimizer: torch.optim.Optimizer = self._engine.basic_optimizer

    def forward(self, batch: Batch, needs: Needs) -> Predictions:
        with torch.no_grad():
            return self._predict(batch.to(self._device), needs)

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        batch = batch.to(self._device)
        value, stats = loss(batch, self._predict(batch, loss.needs))
        # A loss is divided by the whole batch's denominator already, so the ranks' gradients must add up. DeepSpeed takes
        # their mean, which is the sum again if each is first made so many times larger.
        self._engine.backward(value * dist.get_world_size())
        self._has_gradient = True
        return stats

    def optim_step(self) -> Stats:
        rate = learning_rate(self._step, self._optim_config, total_steps=self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = self._take_step() if self._has_gradient else 0.0  # DeepSpeed cannot step without one.
        self._step += 1
        return Stats({"grad_norm": Last(norm), "grad_norm_max": Max(norm), "lr": Last(rate)})

    def iter_full_params(self, *, frozen: bool = False) -> Generator[tuple[str, Tensor]]:
        """On the device and in the model's precision, one layer gathered at a time."""
        for names in self._units():
            wanted = {name: self._model.get_parameter(name) for name in names}
            wanted = {name: parameter for name, parameter in wanted.items() if parameter.requires_grad != frozen}
            with gathered(list(wanted.values())):
                for name, parameter in wanted.items():
                    yield name, parameter.detach()

    def to(self, device: str, *, weights: bool = True) -> None:
        if torch.device(device) != self._device:
            raise ValueError(
                f"DeepSpeed's state cannot move from {self._device} to {device}: set swap of this model to none, and "
                "strategy.cpu_offload to true to keep that state on the host; or use strategy fsdp2"
            )

    def save(self, folder: Path) -> list[Path]:
        self._save_states(folder / STATES_FOLDER)
        files = self._export().write(self._tokenizer, folder)
        if dist.get_rank() == 0:
            files += sync_files(folder / STATES_FOLDER)
        dist.barrier()
        return files

    def load(self, folder: Path) -> None:
        states = folder / STATES_FOLDER
        if not states.is_dir():
            raise written_by_another(folder, "deepspeed")
        refuse_other_adapter(self._model, folder)
        self._step = read_state(states / STEP_FILE, strategy="deepspeed", device=self._device)["step"]
        for file in sorted(states.glob("unit-*.pt")):
            saved = read_state(file, strategy="deepspeed", device=self._device)
            with readable(file):
                for name, state in saved.items():
                    set_fp32_state(self._model.get_parameter(name), state)
        for state in self._optimizer.state.values():
            state["step"].fill_(self._step)

    def _take_step(self) -> float:
        """Update the weights by the gradient, whose norm is returned."""
        self._has_gradient = False
        self._engine.step()
        if not self._engine.was_step_applied():
            raise diverged(self._step)
        return float(self._engine.get_global_grad_norm())

    def _save_states(self, folder: Path) -> None:
        """Masters and moments, a file for each layer: any number of ranks, under any stage, can go on from them."""
        writes = dist.get_rank() == 0
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            write_state({"step": self._step}, folder / STEP_FILE)
        for index, names in enumerate(self._units()):
            states: dict[str, dict[str, Tensor]] = {}
            for name in names:
                parameter = self._model.get_parameter(name)
                if parameter.requires_grad:
                    state = fp32_state(parameter)
                    states[name] = {key: value.cpu() for key, value in state.items()} if writes else {}
            if writes:
                write_state(states, folder / f"unit-{index:05}.pt")

    def _units(self) -> list[list[str]]:
        """The names of the parameters, those of each layer together."""
        units: dict[str, list[str]] = {}
        for name, _ in self._model.named_parameters():
            before, found, after = name.partition(".layers.")
            units.setdefault(after.partition(".")[0] if found else before, []).append(name)
        return list(units.values())

    def _predict(self, batch: Batch, needs: Needs) -> Predictions:
        with nullcontext() if needs.adapter else without_adapter(self._model):
            return Predictions(**self._engine(batch, needs))
