"""Our attention, plugged into Hugging Face models, so that training and generation run the same modules.

The models run on packed ids ([1, T], no padding) with explicit positions. What a token may look at is decided by an
`Attention` object that travels through the model's forward as a keyword argument: `PackedAttention` for training,
the engine's cache for generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention, softmax
from transformers import AttentionInterface, PreTrainedModel

from reroll.errors import ModelError
from reroll.models import exact, fused, recurrent
from reroll.models.routing import Routing
from reroll.models.sight import Sight

try:  # Absent from some builds of PyTorch; the padded path does the same everywhere.
    from torch.nn.attention.varlen import varlen_attn

    _SHARES_HEADS = "enable_gqa" in signature(varlen_attn).parameters
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

IMPLEMENTATION = "reroll"
"""The name under which transformers knows our attention. No mask function is registered: transformers then builds no mask."""

_LARGEST_VARLEN_HEAD = 256

_IGNORED = {"dropout", "position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states", "reroll_routing"}
"""What models also pass that changes nothing here. Dropout never applies: log-probs of a policy must be reproducible."""

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}

_UNFIT = {
    "diffllama": "each of its layers attends twice",
    "doge": "its attention masks are learned",
    "hrm_text": "it runs through its layers several times",
    "nemotron": "its layers do not pass on what our attention needs",
    "phimoe": "its sliding windows stand in masks that are not made here",
}
"""Families that look like all others and are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a layer turns queries and keys into scores."""

    scaling: float
    sliding_window: int | None = None
    """So many tokens back, itself counted, may be looked at; None: all."""
    softcap: float | None = None
    """Scores are bent to stay within ± this."""
    sinks: Tensor | None = None
    """[H] the score of a place that each head may look at beside all others, where there is nothing to see."""

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled products and nothing else."""
        return self.sliding_window is None and self.softcap is None and self.sinks is None


class Attention(Protocol):
    """Decides, for one forward pass, what each packed token looks at."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        """query [T, H, D], key and value [T, H_kv, D] -> [T, H, D]."""


def hidden_states(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    attention: Attention,
    routing: Routing | None = None,
    sight: Sight | None = None,
) -> Tensor:
    """The decoder's last hidden states [T, hidden] for packed `ids` [T] at `positions` [T]; the head is not applied.

    `routing` sees which experts are chosen, once `route_shape` has prepared the model. None: nobody does.
    `sight` is what its eye saw among them; None: nothing but words.
    """
    options: dict[str, Any] = {"reroll_attention": attention}
    if routing is not None:
        options["reroll_routing"] = routing
    if sight is not None:
        options["reroll_sight"] = sight
    with exact.exact_forward(model):
        output = model.base_model(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **options)
    return output.last_hidden_state.squeeze(0)  # type: ignore[no-any-return]


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """What the model's head makes of `hidden` [..., hidden]: [..., vocab], with the scaling that its family adds."""
    with exact.exact_forward(model):
        output: Tensor = model.get_output_embeddings()(hidden)  # type: ignore[no-untyped-call]
        return shape_logits(model, output)


def shape_logits(model: PreTrainedModel, output: Tensor) -> Tensor:
    """Apply to the raw output of the head what some families add: scaling (Granite, Cohere), soft-capping (Gemma)."""
    config = model.config.get_text_config()  # Each family defines its own fields, so absence is normal here.
    if divisor := getattr(config, "logits_scaling", None):
        output = output / divisor
    if factor := getattr(config, "logit_scale", None):
        output = output * factor
    if softcap := getattr(config, "final_logit_softcapping", None):
        output = torch.tanh(output / softcap) * softcap
    return output


def check_supported(model: PreTrainedModel) -> None:
    """Raise ModelError if some layer of this model does not go through our attention."""
    family = model.config.model_type
    if reason := _why_unfit(model):
        raise ModelError(
            f"models of family {family!r} are not supported, {reason}: "
            "use a decoder with plain attention, such as Llama or Qwen3"
        )


def _why_unfit(model: PreTrainedModel) -> str:
    """What keeps a model's layers from our attention; empty if nothing does."""
    has_states = recurrent.is_recurrent(model)
    known = _SUPPORTED_LAYERS | recurrent.KINDS if has_states else _SUPPORTED_LAYERS
    others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - known
    if others:
        return f"since they have layers of kind {', '.join(sorted(others))}"
    if recurrent.has_unknown_state(model):
        return "since their layers carry a state from token to token"
    if not model._supports_attention_backend and not has_states:  # Those that are known here do without saying so.
        return "since transformers lets nobody replace their attention"
    reason = _UNFIT.get(model.config.model_type)
    return f"since {reason}" if reason else ""


class PackedAttention:
    """Causal attention inside each packed sequence; differentiable; never a [T, T] mask.

    Half precision on CUDA uses PyTorch's variable-length kernel. Everything else pads: right padding under a causal
    mask is never looked at, so the fast causal kernel needs no mask. Sequences of very different lengths are padded
    in buckets, so that padding at most doubles the tokens. Indices are computed once, not in every layer.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        self._cu_seqlens = cu_seqlens
        self._varlen = VarlenAttention(cu_seqlens, cu_seqlens)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        if exact.is_exact() and fused.runs_kernels(value):
            return self._exact.attend(query, key, value, scoring, partial(self.attend, layer))  # type: ignore[no-any-return]
        if VarlenAttention.takes(value, scoring):
            return self._varlen.attend(layer, query, key, value, scoring=scoring)
        query, key = query.to(value.dtype), key.to(value.dtype)  # Under autocast, rotary embeddings leave them in fp32.
        scoring = _without_idle_window(scoring, self._varlen.longest)
        pad_indices, unpad_index = self._padding
        outputs = []
        for index in pad_indices:
            q, k, v = (tensor[index].transpose(1, 2) for tensor in (query, key, value))  # [N, heads, L, D]
            outputs.append(
                exact.arithmetic().attend_causal(q, k, v, scoring, _causal) if exact.is_exact() else _causal(q, k, v, scoring)
            )
        flat = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
        return flat[unpad_index]

    def mix(self, layer: int, hidden: Tensor, run: recurrent.Run) -> Tensor:
        """A recurrent layer: each sequence a row that begins with an empty state. Padding comes after all that counts."""
        pad_indices, unpad_index = self._padding
        return torch.cat([run(hidden[index], None).flatten(0, 1) for index in pad_indices])[unpad_index]

    @cached_property
    def _exact(self) -> Any:
        return exact.arithmetic().packed_attention(self._cu_seqlens, self._cu_seqlens, None)

    @cached_property
    def _padding(self) -> tuple[list[Tensor], Tensor]:
        return _padding(self._cu_seqlens.tolist(), self._cu_seqlens.device)


class VarlenAttention:
    """PyTorch's variable-length kernel: causal attention in which the last tokens of each sequence ask.

    `query_bounds` [N + 1] says which tokens ask, `key_bounds` [N + 1] which are looked at.
    """

    def __init__(self, query_bounds: Tensor, key_bounds: Tensor) -> None:
        self._query_bounds, self._key_bounds = query_bounds.to(torch.int32), key_bounds.to(torch.int32)
        self._most_queries, self.longest = (int(bounds.diff().max()) for bounds in (query_bounds, key_bounds))

    @staticmethod
    def takes(value: Tensor, scoring: Scoring) -> bool:
        """Whether the kernel can do this: half precision on CUDA, and heads that fit it."""
        is_half_on_cuda = value.is_cuda and value.dtype in (torch.bfloat16, torch.float16)
        fits = is_half_on_cuda and value.shape[-1] <= _LARGEST_VARLEN_HEAD
        return varlen_attn is not None and fits and scoring.softcap is None and scoring.sinks is None

    @staticmethod
    def copies_of_each_key(query: Tensor, key: Tensor) -> int:
        """How many heads of keys and values the kernel needs for one: query heads that share them can use one from torch
        2.12 on."""
        return 1 if _SHARES_HEADS else query.shape[1] // key.shape[1]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scoring: Scoring) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)  # Under autocast, rotary embeddings leave them in fp32.
        behind = _without_idle_window(scoring, self.longest).sliding_window
        options: dict[str, Any] = {"scale": scoring.scaling, "window_size": (-1 if behind is None else behind - 1, 0)}
        if _SHARES_HEADS:
            options["enable_gqa"] = query.shape[1] != key.shape[1]
        else:
            key, value = _for_all_heads(query, key, value)
        bounds, most = (self._query_bounds, self._key_bounds), (self._most_queries, self.longest)
        result = varlen_attn(query, key, value, *bounds, *most, **options)
        assert isinstance(result, Tensor)  # Not a tuple: no extras were asked for.
        return result


def _without_idle_window(scoring: Scoring, longest: int) -> Scoring:
    """Leave out a window that is as wide as the longest sequence."""
    if scoring.sliding_window is not None and scoring.sliding_window >= longest:
        return replace(scoring, sliding_window=None)
    return scoring


def _padding(bounds: Sequence[int], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Which token each padded place shows, one [N, L] index per bucket; and where each token went, [T]."""
    spans = [(start, end - start) for start, end in pairwise(bounds) if end > start]
    longest = max(length for _, length in spans)
    if longest * len(spans) <= 2 * bounds[-1]:
        buckets = [spans]
    else:
        sizes = sorted({length.bit_length() for _, length in spans})
        buckets = [[span for span in spans if span[1].bit_length() == size] for size in sizes]
    pad_indices, unpad_index, base = [], torch.empty(bounds[-1], dtype=torch.int64), 0
    for bucket in buckets:
        starts, lengths = torch.tensor(bucket).unbind(1)
        width = int(lengths.max())
        offsets = torch.arange(width).expand(len(bucket), width)
        index = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)  # Padding repeats the last token.
        real = offsets < lengths[:, None]
        unpad_index[index[real]] = base + torch.arange(index.numel()).view_as(index)[real]
        base += index.numel()
        pad_indices.append(index.to(device))
    return pad_indices, unpad_index.to(device)


def _causal(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention of right-padded rows [N, heads, L, D]."""
    if scoring.is_plain and query.device.type == "cpu":
        # The CPU kernel's backward pass in bf16 takes twice its time in fp32, casts included.
        wide = torch.promote_types(value.dtype, torch.float32)
        output = scaled_dot_product_attention(
            query.to(wide), key.to(wide), value.to(wide), is_causal=True, scale=scoring.scaling, enable_gqa=True
        )
        return output.to(value.dtype)
    key, value = _for_all_heads(query, key, value)
    if scoring.is_plain:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scoring.scaling)
    offsets = torch.arange(query.shape[2], device=query.device)
    behind = offsets[:, None] - offsets[None, :]
    visible = (behind >= 0) & (behind < (scoring.sliding_window or query.shape[2]))
    sinks = None if scoring.sinks is None else scoring.sinks[:, None, None]
    return attend_visible(query, key, value, visible, scoring, sinks)


def _for_all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated (dimension 1) for the query heads that share them."""
    groups = query.shape[1] // key.shape[1]
    return (key, value) if groups == 1 else (key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))


def attend_visible(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scoring: Scoring, sinks: Tensor | None = None
) -> Tensor:
    """Attention to the keys that `visible` [..., Q, L] (True: may look) allows; the window is in it already.

    `sinks` [..., Q or 1, 1] are those of the scoring, by row of the query.
    """
    softcap = scoring.softcap
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scoring.scaling)
    scores = query @ key.transpose(-1, -2) * scoring.scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf")).float()
    if sinks is None:
        return softmax(scores, -1).to(value.dtype) @ value
    with_sinks = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1)
    return softmax(with_sinks, -1)[..., :-1].to(value.dtype) @ value


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    reroll_attention: Attention | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer: [1, heads, T, D] in, [1, T, heads, D] out.

    Where keys are longer than values, or the reverse, zeros make them equal: they change no score and no sum.
    """
    if reroll_attention is None:
        raise ModelError("a model loaded by reroll runs through reroll.models.attention.hidden_states, not by calling it")
    if unknown := [name for name, value in others.items() if value is not None and name not in _IGNORED]:
        raise ModelError(
            f"this model's attention needs {', '.join(unknown)}, which reroll does not support: use another family"
        )
    if attention_mask is not None:
        raise ModelError("this model makes an attention mask of its own, which reroll does not support: use another family")
    if s_aux is not None and len(s_aux) != query.shape[1]:
        raise ModelError(f"{len(s_aux)} attention sinks do not fit {query.shape[1]} heads: set strategy.tp to 1")
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    if key_dim != value_dim:
        query, key, value = (pad(each, (0, max(key_dim, value_dim) - each.shape[-1])) for each in (query, key, value))
    # Not `[0]`: its gradient is a copy, where that of `squeeze` is a view.
    packed = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    layer: int = module.layer_idx  # type: ignore[assignment]
    scoring = Scoring(scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux)
    output = reroll_attention.attend(layer, *packed, scoring=scoring)
    return output[..., :value_dim].unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _forward)
