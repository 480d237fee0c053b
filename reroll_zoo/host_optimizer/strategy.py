"""The strategy `torch` with masters and moments in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from reroll.training.base import Strategy
from reroll.training.torch_strategy import TorchStrategy
from reroll_zoo.host_optimizer import PIECE_VALUES
from reroll_zoo.host_optimizer.memory import host_tensors
from reroll_zoo.host_optimizer.stream import Piece, take_through

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


class HostOptimizerStrategy(TorchStrategy):
    """As `TorchStrategy`, to the bit; the model's device holds the weights, the sums of their gradients, and nothing else.

    What the optimizer is given in the place of masters are stand-ins: of their shapes, without their memory, with their
    gradients. A checkpoint is written while the run stands still: there is no room for a copy of what lies on the host.
    """

    maps_state = True  # There is no room for a second one.

    def _make_masters(self) -> tuple[dict[str, nn.Parameter], Mapping[str, Tensor]]:
        apart = {name: one for name, one in self._parameters.items() if one.dtype != torch.float32}
        sizes = {(name, key): one.shape for name, one in self._parameters.items() for key in MOMENTS}
        sizes |= {(name, MASTER): one.shape for name, one in apart.items()}
        self._host = host_tensors(sizes, pinned=self.device.type == "cuda")
        for name, parameter in apart.items():
            self._host[name, MASTER].copy_(parameter.detach())
        masters = {name: _stand_in(one) if name in apart else one for name, one in self._parameters.items()}
        return masters, {name: self._host[name, MASTER] for name in apart}

    def _step_optimizer(self) -> None:
        take_through(self.device, list(self._pieces()))

    def _pieces(self) -> Iterator[Piece]:
        """All that has a gradient, with a step counted."""
        names = {master: name for name, master in self._masters.items()}
        for group in self._optimizer.param_groups:
            for master in group["params"]:
                if master.grad is None:
                    continue
                name, state = names[master], self._optimizer.state[master]
                if not state:
                    state |= {"step": torch.zeros(()), **self._moments(name)}
                parts = [key for key in (MASTER, *MOMENTS) if (name, key) in self._host]
                step = partial(_step, taken=float(state["step"]), options=group)
                for start in range(0, master.numel(), PIECE_VALUES):
                    piece = slice(start, start + PIECE_VALUES)
                    on_device = (self._parameters[name].detach().view(-1)[piece], master.grad.reshape(-1)[piece])
                    host = tuple(self._host[name, key].view(-1)[piece] for key in parts)
                    yield Piece(host, partial(step, *on_device))
                state["step"] += 1

    def _moments(self, name: str) -> dict[str, Tensor]:
        return {key: self._host[name, key] for key in MOMENTS}

    def _move_optimizer(self, where: torch.device) -> None:
        """It stays where it is; stand-ins are where the model is, for its gradients."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                self._masters[name].data = _stand_in(parameter).data

    def stage(self, folder: Path) -> Callable[[], list[Path]]:
        return Strategy.stage(self, folder)

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        self._optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
        names = {master: name for name, master in self._masters.items()}
        masters = [master for group in self._optimizer.param_groups for master in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, master in zip(numbers, masters, strict=True):
            moments = self._moments(names[master])
            state = saved["state"].get(number)
            for key, values in moments.items():
                values.copy_(state[key]) if state else values.zero_()
            if state:
                self._optimizer.state[master] = {"step": state["step"].float(), **moments}


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter in fp32 of the same shape, on the same device, of one value."""
    return nn.Parameter(torch.empty((), device=parameter.device).expand(parameter.shape))


def _step(parameter: Tensor, gradient: Tensor, there: Sequence[Tensor], *, taken: float, options: Mapping[str, Any]) -> None:
    """AdamW's step on a part of a parameter, after so many; `there` are its values, if it has others than the model, and its
    moments."""
    *apart, mean, square = there
    values = apart[0] if apart else parameter
    beta1, beta2 = options["betas"]
    adamw(
        [values], [gradient], [mean], [square], [], [torch.full((), taken, device=values.device)],
        fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2,
        lr=options["lr"], weight_decay=options["weight_decay"], eps=options["eps"],
    )  # fmt: skip
    if apart:
        parameter.copy_(values)
