"""Log-probs that are equal to the bit, whatever a token is computed with: packed, alone, or after what a cache holds.

A model that was loaded to be exact computes its forward passes inside `exact_forward`, in the trainer and in the engine. What
depends on how much is computed together has another way there: products, activations, attention. Those ways are the entry
point `exact` of the group `reroll.kernels`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from reroll.config.registry import load_entry
from reroll.errors import ModelError
from reroll.models.recurrent import is_recurrent

if TYPE_CHECKING:
    from reroll.models.attention import Scoring

_here = threading.local()
_MARK = "reroll_is_exact"


class ExactArithmetic(Protocol):
    """Forward passes whose sums have a fixed order. Gradients are those of the quick ways."""

    def exact_functions(self) -> AbstractContextManager[Any]:
        """Inside, what a model calls of torch's functions is exact."""

    def attend_causal(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, quick: Any) -> Tensor:
        """Causal attention of right-padded rows [N, heads, L, D], with the gradient of `quick`."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """query [N, H, R, D], keys and values [N, H, L, D], visible [N or 1, H or 1, R or 1, L], sinks [H, R, 1]: what each of
        the rows looks at."""

    def packed_attention(self, query_bounds: Tensor, key_bounds: Tensor, index: Tensor | None) -> Any:
        """For a GPU: has `attend(query [T, H, D], key, value [U, H_kv, D], scoring, quick)`. `query_bounds` [N + 1]: the last
        tokens of each sequence, which ask; `key_bounds` [N + 1]: its places; `index`: their tokens."""


@cache
def arithmetic() -> ExactArithmetic | Any:
    """What the entry point `exact` of the group `reroll.kernels` names."""
    found = load_entry("reroll.kernels", "exact")
    if found is None:
        raise ModelError("policy.exact: no installed package has the arithmetic for it (reroll_zoo has): leave it out")
    return found


def is_exact() -> bool:
    """Whether this thread is inside `exact_forward` of a model that is exact."""
    return getattr(_here, "on", False)


def exact_forward(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, what this thread computes is exact, if the model was loaded to be."""
    return _on() if can_be_exact(model) and not is_exact() else nullcontext()


def can_be_exact(model: PreTrainedModel) -> bool:
    """Whether `make_exact` was called for this model."""
    return bool(getattr(model, _MARK, False))


def make_exact(model: PreTrainedModel) -> None:
    """From now on `exact_forward` means this model too. Raises ModelError for one whose layers carry a state."""
    if is_recurrent(model):
        raise ModelError(
            f"policy.exact: the states that layers of family {model.config.model_type!r} carry have no fixed order of sums: "
            "leave it out"
        )
    arithmetic()
    setattr(model, _MARK, True)
    model.set_experts_implementation("eager")


def recompute_contexts(model: PreTrainedModel) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Inside which a checkpointed layer runs the first time, and again for the backward pass."""
    return nullcontext(), _on() if can_be_exact(model) else nullcontext()


@contextmanager
def _on() -> Iterator[None]:
    _here.on = True
    try:
        with arithmetic().exact_functions():
            yield
    finally:
        _here.on = False


def logprobs_of(scaled: Tensor, tokens: Tensor) -> Tensor:
    """fp32 log-probs of `tokens` [R] under softmax(scaled) [R, V]."""
    return scaled.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
