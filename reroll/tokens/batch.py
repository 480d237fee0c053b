"""Samples packed into one-dimensional tensors: no padding, sequence boundaries in `cu_seqlens`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reroll.tokens.pictures import pictures_to_send, receive_pictures
from reroll.types import Sample

_T, _N = {"axis": "token"}, {"axis": "sequence"}
"""What the first axis of a field counts. A field without it is not taken along when rows are selected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed rows. Entry t of every [T] tensor talks about token t, given the tokens of its sequence before it.

    The denominators are global: they count the whole batch that one optimizer step sees, and survive `select`, so any
    cut into micro-batches or ranks sums to the same gradient.
    """

    ids: Tensor = field(metadata=_T)
    """[T] int64"""
    cu_seqlens: Tensor = field(metadata={"axis": "boundary"})
    """[N + 1] int64, first 0, last T."""
    loss_mask: Tensor = field(metadata=_T)
    """[T] bool; never true on a sequence's first token."""
    logp: Tensor = field(metadata=_T)
    """[T] fp32, log-prob as sampled; 0 off the mask."""
    turn: Tensor = field(metadata=_T)
    """[T] int64: which turn of its trajectory wrote the token; -1 off the mask."""
    advantage: Tensor = field(metadata=_T)
    """[T] fp32; 0 off the mask."""
    num_loss_tokens: int
    """Global count of tokens in the loss."""
    num_sequences: int
    """Global count of sequences with at least one token in the loss."""
    version: Tensor | None = field(default=None, metadata=_T)
    """[T] int64: the oldest weights that had a hand in the token's turn; -1 off the mask. None: it is not to be asked after."""
    routes: Tensor | None = field(default=None, metadata=_T)
    """[T, layers, top_k] uint8 or int16: the experts that the engine chose, which the policy takes too; the type's largest
    number where they are not known."""
    temperature: float | Tensor = field(default=1.0, metadata=_T)
    """Log-probs are of softmax(logits / temperature), as the sampler's; [T] where rows were drawn at different ones."""
    old_logp: Tensor | None = field(default=None, metadata=_T)
    """[T] log-prob under the policy at the start of the update; None: the first forward pass defines it."""
    ref_logp: Tensor | None = field(default=None, metadata=_T)
    """[T] log-prob under the reference policy."""
    value: Tensor | None = field(default=None, metadata=_T)
    """[T] the critic's estimate before the update."""
    returns: Tensor | None = field(default=None, metadata=_T)
    """[T] what the critic is trained to predict."""
    target_ids: Tensor | None = field(default=None, metadata=_T)
    """[T, k] int64: the likeliest tokens at each position under the target distribution, a teacher's or the reference's; None:
    `target_logp` covers the vocabulary."""
    target_logp: Tensor | None = field(default=None, metadata=_T)
    """[T, k + 1] their log-probs, and last that of all other tokens together; or [T, vocabulary]."""
    target_weight: Tensor | None = field(default=None, metadata=_T)
    """[T] weight of the divergence from the target; 0 where there is no teacher."""
    selected: Tensor | None = field(default=None, metadata=_T)
    """[T] bool: tokens that a loss picked out of the whole batch of one optimizer step."""
    label: Tensor | None = field(default=None, metadata=_N)
    """[N] what a preference loss knows about each sequence: a margin, or +1 for wanted and -1 for unwanted."""
    unit_size: int = 1
    """So many neighbouring sequences are never parted: 2 for pairs of a chosen and a rejected answer."""

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return torch.diff(self.cu_seqlens).tolist()

    @property
    def unit_lengths(self) -> list[int]:
        """Tokens of each unit of neighbours that stay together."""
        return torch.diff(self.cu_seqlens[:: self.unit_size]).tolist()

    @property
    def positions(self) -> Tensor:
        """[T] place of each token in its sequence."""
        return torch.arange(self.num_tokens, device=self.ids.device) - self.cu_seqlens[self.sequence_index]

    @property
    def sequence_index(self) -> Tensor:
        """[T] which sequence each token belongs to."""
        numbers, lengths = torch.arange(len(self), device=self.ids.device), torch.diff(self.cu_seqlens)
        return torch.repeat_interleave(numbers, lengths, output_size=self.num_tokens)  # Else a GPU is waited for.

    def replace(self, **changes: Any) -> Batch:
        """A new batch with these fields set."""
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Batch:
        return self.replace(**{name: value.to(device) for name, value in self._tensors().items()})

    def select(self, indices: Sequence[int]) -> Batch:
        """These sequences, in this order; global denominators kept."""
        if list(indices) == list(range(len(self))):
            return self
        bounds = self.cu_seqlens.tolist()
        rows = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in indices]).to(self.ids.device)
        lengths = [bounds[i + 1] - bounds[i] for i in indices]
        by_sequence = {name: value[list(indices)] for name, value in self._tensors("sequence").items()}
        return self.rearrange(rows, lengths).replace(**by_sequence)

    def rearrange(self, tokens: Tensor, lengths: Sequence[int]) -> Batch:
        """These tokens as sequences of these lengths, with nothing known about them as a whole; global denominators kept."""
        picked = {name: value[tokens] for name, value in self._tensors("token").items()}
        forgotten = dict.fromkeys(self._tensors("sequence"))
        return self.replace(cu_seqlens=_cumulate(lengths).to(self.ids.device), **picked, **forgotten)

    def select_units(self, indices: Sequence[int]) -> Batch:
        """As `select`, by unit."""
        return self.select([unit * self.unit_size + place for unit in indices for place in range(self.unit_size)])

    def without_untrained(self) -> Batch:
        """Only the sequences that have a token in the loss, counted anew. At least one stays, so that it is a batch."""
        return self.select(self._is_trained.nonzero().squeeze(1).tolist() or [0]).recount()

    def recount(self) -> Batch:
        """The same rows as a batch of their own: denominators counted anew. One optimizer step, one recount."""
        return replace(self, num_loss_tokens=int(self.loss_mask.sum()), num_sequences=int(self._is_trained.sum()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as arrays: where shared memory carries them, a reader sees the sender's bytes and copies none. Read-only.
        With them go the pictures that they show, each once."""
        arrays = {each.name: _as_array(getattr(self, each.name)) for each in fields(self)}
        return _from_arrays, (arrays, pictures_to_send(arrays["ids"]))

    @property
    def _is_trained(self) -> Tensor:
        """[N] bool: whether a sequence has a token in the loss."""
        num_before = torch.cat([self.cu_seqlens.new_zeros(1), self.loss_mask.cumsum(0)])
        return num_before[self.cu_seqlens].diff() > 0

    def _tensors(self, axis: str | None = None) -> dict[str, Tensor]:
        """The fields that are tensors, by name: all, or those whose first axis counts this."""
        named = {each.name: getattr(self, each.name) for each in fields(self) if axis in (None, each.metadata.get("axis"))}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def pack(samples: Sequence[Sample], *, temperature: float = 1.0) -> Batch:
    """Samples in order, packed; their own counts as the global denominators. Advantages are 1: rows to imitate."""
    if not samples:
        raise ValueError("nothing to pack: no samples")

    def concat(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, name) for sample in samples]))

    return Batch(
        ids=concat("ids"),
        cu_seqlens=_cumulate([len(sample.ids) for sample in samples]),
        loss_mask=concat("loss_mask"),
        logp=concat("logp"),
        turn=concat("turn"),
        advantage=concat("loss_mask").float(),
        num_loss_tokens=0,
        num_sequences=0,
        version=None if any(sample.version is None for sample in samples) else concat("version"),
        routes=_routes(samples),
        temperature=temperature,
    ).recount()


def _routes(samples: Sequence[Sample]) -> Tensor | None:
    """Those that are known, and a mark for all others; None if none is."""
    known = next((sample.routes for sample in samples if sample.routes is not None), None)
    if known is None:
        return None
    num_tokens, end = sum(len(sample.ids) for sample in samples), 0
    total = np.full((num_tokens, *known.shape[1:]), np.iinfo(known.dtype).max, known.dtype)
    for sample in samples:
        begin, end = end, end + len(sample.ids)
        if sample.routes is not None:
            total[begin:end] = sample.routes
    return torch.from_numpy(total)


def _cumulate(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)


def _as_array(value: Any) -> Any:
    has_array = isinstance(value, Tensor) and value.dtype is not torch.bfloat16  # Which numpy does not know.
    return value.numpy(force=True) if has_array else value


def _from_arrays(values: dict[str, Any], pictures: dict[str, bytes]) -> Batch:
    receive_pictures(pictures)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # Nobody writes into a batch.
        tensors = {name: torch.from_numpy(value) for name, value in values.items() if isinstance(value, np.ndarray)}
    return Batch(**(values | tensors))
