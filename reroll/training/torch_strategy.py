"""One process, one device, plain PyTorch: the strategy that every other kind is measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reroll.config.parts import OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.models.exact import recompute_contexts
from reroll.models.fused import add_
from reroll.models.heads import SCORE
from reroll.models.load import Head, has_adapter, load_model, save_model, without_adapter
from reroll.models.recurrent import is_recurrent
from reroll.observe.files import sync_files
from reroll.observe.metrics import Stats
from reroll.tokens.batch import Batch
from reroll.training.base import Loss, Needs, Predictions, Strategy
from reroll.training.offload import HostCopies, PinnedOffload, synchronize
from reroll.training.optimizer import adamw, prepare_step
from reroll.training.predict import predict
from reroll.training.saved import read_state, readable, refuse_other_adapter, refuse_other_model, write_state

STATE_FILE = "trainer.pt"


class TorchStrategy(Strategy):
    """Trains `model`, whose dtype is the precision it computes in.

    AdamW always works on fp32 parameters. In fp32 they are the model's own; in bf16 they are master copies, from which
    each step refreshes the model's parameters in place, and micro-batch gradients are summed in fp32 as the backward pass
    makes them. What does not require a gradient is left alone: of a model with an adapter, only that is trained, pushed and
    saved. A kind of the group `reroll.optimizers` may keep masters and moments elsewhere.
    """

    holds_whole = True
    maps_state = False
    """Whether a saved state is mapped from its file, because it is copied where it belongs."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: TorchStrategyConfig,
        optim: OptimConfig,
        *,
        total_steps: int,
        head: Head = "language",
    ) -> None:
        self._model, self._tokenizer, self._head = model, tokenizer, head
        self._config, self._optim_config = config, optim
        self.merges_prefixes = not is_recurrent(model)
        self._total_steps, self._step = total_steps, 0
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._masters, self._beside = self._make_masters()
        for name in self._beside:
            self._parameters[name].register_post_accumulate_grad_hook(partial(_take_gradient, self._masters[name]))  # type: ignore[no-untyped-call]
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        self._optimizer = adamw(self._masters.values(), optim)
        self._offload, self._copies = PinnedOffload(), HostCopies(model.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are now."""
        return self._model.device

    def forward(self, batch: Batch, needs: Needs) -> Predictions:
        with torch.no_grad():
            return self._predict(batch.to(self.device), needs)

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        batch = batch.to(self.device)
        value, stats = loss(batch, self._predict(batch, loss.needs))
        value.backward()  # type: ignore[no-untyped-call]
        return stats

    def scale_gradients(self, factor: float) -> None:
        for master in self._masters.values():
            if master.grad is not None:
                master.grad.mul_(factor)

    def optim_step(self) -> Stats:
        self._offload.wait_for_prefetch()
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        stats = prepare_step(self._optimizer, norm, self._optim_config, step=self._step, total_steps=self._total_steps)
        self._step_optimizer()
        self._optimizer.zero_grad()
        self._step += 1
        return stats

    def weights(self, *, frozen: bool = False) -> Mapping[str, Tensor]:
        return {
            name: parameter.detach()
            for name, parameter in self._model.named_parameters()
            # An engine generates: it knows nothing of a critic's head.
            if (name not in self._parameters) == frozen and not name.startswith(f"{SCORE}.")
        }

    def parts(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def to(self, device: str, *, weights: bool = True) -> None:
        where, gpu = torch.device(device), self.device
        self._offload.wait_for_prefetch()
        if weights:
            places = count()  # In the same order every time.
            nn.Module._apply(self._model, lambda tensor: self._offload.moved(next(places), tensor, where))  # type: ignore[no-untyped-call]
        self._move_optimizer(where)
        if where.type == "cpu":
            synchronize(gpu)
        elif weights:
            self._offload.wait_for_prefetch()  # What is left behind is needed at the optimizer's step, not before.

    def save(self, folder: Path) -> list[Path]:
        return self._write(self._model, self._state(), folder)

    def stage(self, folder: Path) -> Callable[[], list[Path]]:
        return partial(self._write, self._copies.of_model(self._model), self._copies.of_state(self._state()), folder)

    def load(self, folder: Path) -> None:
        self._offload.wait_for_prefetch()
        state = read_state(folder / STATE_FILE, strategy="torch", device=None if self.maps_state else self.device)
        refuse_other_adapter(self._model, folder)
        # A run in fp32 saves no masters: its weights are them, and a run in bf16 goes on from them as they are.
        saved = self._saved_parameters(folder, dtype=self._model.dtype if state["masters"] else torch.float32)
        # Of a model that is only held, every weight was saved, and none has a master.
        parameters = self._parameters or dict(self._model.named_parameters())
        refuse_other_model(saved, parameters, folder)
        with readable(folder / STATE_FILE):
            self._load_optimizer(state["optimizer"])
        with torch.no_grad():
            for name, parameter in parameters.items():
                exact = state["masters"].get(name, saved[name])
                parameter.copy_(exact)
                if name in self._beside:
                    self._beside[name].copy_(exact)
        self._step = state["step"]

    def _state(self) -> dict[str, Any]:
        """What is needed beside the model to go on."""
        self._offload.wait_for_prefetch()
        return {"step": self._step, "optimizer": self._optimizer.state_dict(), "masters": dict(self._beside)}

    def _write(self, model: PreTrainedModel, state: dict[str, Any], folder: Path) -> list[Path]:
        save_model(model, self._tokenizer, folder)
        write_state(state, folder / STATE_FILE)
        return sync_files(folder)

    def _saved_parameters(self, folder: Path, *, dtype: torch.dtype) -> Mapping[str, Tensor]:
        if has_adapter(self._model):
            from reroll.models.lora import read_adapter

            return read_adapter(self._model, folder)
        return dict(load_model(str(folder), dtype=dtype, device="cpu", head=self._head).named_parameters())

    def _predict(self, batch: Batch, needs: Needs) -> Predictions:
        with nullcontext() if needs.adapter else without_adapter(self._model):
            return predict(self._model, batch, needs, chunk=self._config.logprob_chunk)

    def _make_masters(self) -> tuple[dict[str, nn.Parameter], Mapping[str, Tensor]]:
        """What the optimizer works on, with its gradients; and the values of those that are not the model's own."""
        masters = {
            name: parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for name, parameter in self._parameters.items()
        }
        return masters, {name: master for name, master in masters.items() if master is not self._parameters[name]}

    def _step_optimizer(self) -> None:
        """A step by the gradients of the masters, and the model's parameters as they are then."""
        self._optimizer.step()
        with torch.no_grad():
            for name, values in self._beside.items():
                self._parameters[name].copy_(values)

    def _move_optimizer(self, where: torch.device) -> None:
        for name, master in self._masters.items():
            if name in self._beside:
                master.data = self._offload.moved((name, "master"), master.data, where)
            state = self._optimizer.state.get(master, {})
            for key, value in state.items():
                if key != "step":  # One number.
                    state[key] = self._offload.moved((name, key), value, where)

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(saved)


def _take_gradient(master: nn.Parameter, parameter: Any) -> None:
    """Add a gradient to the sum the moment it is there: of all of them in the model's precision, one is held at a time."""
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        add_(master.grad, parameter.grad)
    parameter.grad = None


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Transformers checkpoints in training mode only; dropout, which that mode would switch on, is taken out."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    again = {"use_reentrant": False, "context_fn": partial(recompute_contexts, model)}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
    model.train()
