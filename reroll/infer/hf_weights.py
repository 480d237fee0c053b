"""Weights that a trainer publishes, checked against a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn


class WeightChecker:
    """Checks weights, by Hugging Face name, against a model. They may come in parts; `rest` checks that all are there."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())  # Tied parameters appear once.
        self._aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(self.parameters)
        self.received: frozenset[str] = frozenset()
        """Names received in parts since weights were last complete."""

    def part(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some of the weights, each under one name. Raises ValueError if they do not fit."""
        taken = self._checked(given, missing=())
        self.received |= taken.keys()
        return taken

    def rest(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rest of the weights, each under one name. Raises ValueError unless all that is trained has come now."""
        trained = {name for name, parameter in self.parameters.items() if parameter.requires_grad}
        taken = self._checked(given, missing=trained - set(given) - self.received)
        self.received = frozenset()
        return taken

    def _checked(self, given: Mapping[str, Tensor], *, missing: Collection[str]) -> dict[str, Tensor]:
        unknown = set(given) - set(self.parameters) - self._aliases
        if missing or unknown:
            raise ValueError(f"weights do not fit the model: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")
        taken = {name: tensor.detach() for name, tensor in given.items() if name in self.parameters}
        for name, tensor in taken.items():
            if tensor.shape != (needed := self.parameters[name].shape):
                raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}, the model needs {tuple(needed)}")
        return taken
