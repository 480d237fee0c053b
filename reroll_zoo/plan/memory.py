"""Bytes that a role needs on each of its devices, term by term.

Terms fall in two: what a role holds for as long as it is on its devices (`held`), and what comes and goes while it works
(`working`). Every function gives the bytes of one device, as a dict from the term's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reroll_zoo.host_optimizer import NUM_SLOTS, PIECE_VALUES
from reroll_zoo.plan.shape import ModelShape

Terms = dict[str, int]

GIB = 2**30
CONTEXT_BYTES = 600 * 2**20
"""What a process takes of a GPU by opening it: driver state and kernels. Stays until the process ends."""
FP32_BYTES = 4
CODE_BYTES = 1 + FP32_BYTES / 128**2
"""Of a weight that an engine holds in fp8: its code, and its part of the scale of its block."""
ADAM_BYTES = 8
"""Two fp32 moments for each trained parameter."""
ZERO_BUCKET_BYTES = 4 * 50_000_000
"""DeepSpeed's buffer of numbers on their way to other ranks."""
PREFILL_TOKENS = 8192
"""Context tokens that an engine reads in one step."""
MAX_CACHED_BYTES = 2 * GIB
"""What the embedded engine may keep of ended requests."""
PAGE_TOKENS, FIRST_PAGES = 64, 256
"""The embedded engine's pages on a GPU, and how many it starts with; then it doubles them."""
_GEMMAS = {"gemma", "gemma2", "gemma3_text"}
_SOFTCAPPED = {"gemma2"}
"""Families whose attention has no fast kernel: the scores of every pair of tokens are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """The terms of one role on one device."""

    held: Terms = field(default_factory=dict)
    working: Terms = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained, or asked: what its memory follows from beside its sizes."""

    value_bytes: int
    """Bytes of one value in the precision that the model computes in."""
    micro_batch_tokens: int
    """That one rank holds: of a sequence that several share, its part."""
    logprob_chunk: int = 1024
    checkpointing: bool = False
    longest: int = 1024
    """Tokens of the longest sequence."""
    lora_parameters: int = 0
    """Parameters of the adapter, where that alone is trained."""
    has_language_head: bool = True
    shards: int | None = None
    """Ranks that the parameters are cut over; None: every rank holds them whole."""
    reshard: bool = True
    """Layers are cut up again between forward and backward pass."""
    tp: int = 1
    """Ranks that every layer is cut over."""
    sp: int = 1
    """Ranks that share the tokens of every sequence."""
    ep: int = 1
    """Ranks that share out the experts of every layer."""
    host_optimizer: bool = False
    """Masters and moments live in the host's memory, and visit the device in pieces."""
    offload: bool = False
    """Parameters and optimizer live in the host's memory and visit the device."""
    zero_stage: int | None = None
    """What DeepSpeed cuts over `zero_ranks`: 1 masters and optimizer, 2 gradients too, 3 the parameters as well."""
    zero_ranks: int = 1
    on_cpu: bool = False

    @property
    def cut(self) -> int:
        """Into how many parts the parameters are cut in all."""
        return (self.shards or 1) * self.tp


def parameter_count(shape: ModelShape, *, has_language_head: bool = True) -> int:
    """Parameters of a language model, or of the same decoder with a scalar head."""
    if has_language_head:
        return shape.num_parameters
    return shape.num_parameters - (0 if shape.is_tied else shape.head_parameters) + shape.hidden


def train_memory(shape: ModelShape, how: Training) -> RoleMemory:
    """A model under training: its parameters, gradients and optimizer, and one micro-batch on its way through."""
    total = parameter_count(shape, has_language_head=how.has_language_head)
    trained = how.lora_parameters or total
    held, working = _parameter_terms(shape, how, total=total), {}
    if how.zero_stage is not None:
        held |= {"fp32 masters": trained * FP32_BYTES // how.zero_ranks}
        working = {"gradients": _zero_gradient_bytes(shape, how, trained=trained), "exchange": ZERO_BUCKET_BYTES}
    elif how.shards is None:
        held |= {"fp32 masters": _master_bytes(how, trained=trained) // how.tp}
        working["gradients"] = trained * FP32_BYTES // how.tp  # Their sums: a micro-batch's own join them one by one.
    else:
        working["gradients"] = trained * FP32_BYTES // how.cut + _layer_bytes(shape, how)
    held["optimizer"] = trained * ADAM_BYTES // (how.zero_ranks if how.zero_stage else how.cut)
    if how.offload:  # Below stage 3 DeepSpeed leaves the parameters where they are.
        held = {"parameters": held["parameters"]} if how.zero_stage in (1, 2) else {}
        working["gradients"] = 2 * _layer_bytes(shape, how)
    working |= _gathered_terms(shape, how)
    working["activations"] = activation_bytes(shape, how)
    if how.has_language_head:
        working["log-prob chunk"] = logprob_bytes(shape, how)
    if how.host_optimizer:  # Its pieces come when the last micro-batch has gone, and take its room.
        held = {"parameters": held["parameters"]}
        pieces = NUM_SLOTS * 3 * FP32_BYTES * min(PIECE_VALUES, trained)
        working["optimizer's pieces"] = max(0, pieces - working["activations"] - working.get("log-prob chunk", 0))
    return RoleMemory(held=_nonzero(held), working=_nonzero(working))


def host_memory(shape: ModelShape, how: Training) -> Terms:
    """What a model under training keeps in the memory of its host, page-locked."""
    if not how.host_optimizer:
        return {}
    trained = how.lora_parameters or parameter_count(shape, has_language_head=how.has_language_head)
    return _nonzero({"fp32 masters": _master_bytes(how, trained=trained), "optimizer": trained * ADAM_BYTES})


def _master_bytes(how: Training, *, trained: int) -> int:
    """In fp32 the parameters are their own masters."""
    return 0 if how.value_bytes == FP32_BYTES else trained * FP32_BYTES


def answer_memory(shape: ModelShape, how: Training) -> RoleMemory:
    """A model that only answers (a reference, a teacher, a reward model): its parameters and one layer's work."""
    total = parameter_count(shape, has_language_head=how.has_language_head)
    held = {} if how.offload else _parameter_terms(shape, how, total=total)
    working = _gathered_terms(shape, how)
    working["activations"] = forward_bytes(shape, num_tokens=how.micro_batch_tokens, value_bytes=how.value_bytes) // how.tp
    if how.has_language_head:
        working["log-prob chunk"] = _logits_bytes(shape, how) // how.tp
    return RoleMemory(held=_nonzero(held), working=_nonzero(working))


def activation_bytes(shape: ModelShape, how: Training) -> int:
    """What a micro-batch leaves behind for the backward pass."""
    size, tokens = how.value_bytes, how.micro_batch_tokens
    layer = layer_activation_bytes(shape, how)
    ends = (FP32_BYTES + 3 * size) * shape.hidden  # The last norm, the embedding's rows and the rows that the head reads.
    if how.checkpointing:
        return tokens * (shape.num_layers * size * shape.hidden + layer + ends)
    return tokens * (shape.num_layers * layer + ends)


def layer_activation_bytes(shape: ModelShape, how: Training) -> int:
    """Of one token in one layer: the inputs of everything that is differentiated."""
    size, width, kv_width = how.value_bytes, shape.query_width, shape.kv_width
    is_fused = not how.on_cpu and shape.family not in _GEMMAS  # One kernel: its input is kept, and no fp32 copy.
    if shape.family in _GEMMAS:
        norms = (2 * FP32_BYTES * (shape.norm_parameters // shape.hidden) + 2 * size) * shape.hidden
    else:
        norms = 2 * ((0 if is_fused else FP32_BYTES) + 2 * size) * shape.hidden
    if shape.has_qk_norm:
        norms += ((0 if is_fused else FP32_BYTES) + size) * (width + kv_width) // how.tp
    if how.on_cpu:  # The CPU's kernel works in fp32.
        attention = FP32_BYTES * (2 * width + 2 * kv_width) + size * width
    else:  # Keys and values are repeated for every query head; padding copies once more in fp32.
        attention = size * width * (5 if size == FP32_BYTES else 4)
    if shape.family in _SOFTCAPPED:
        attention += shape.num_heads * how.longest * (2 * size + FP32_BYTES + 1)
    mlp = 4 * size * shape.mlp_width
    if shape.num_sparse_layers:  # A token is copied for each of its experts, in and out, and once more if it travelled.
        copies = 2 if how.ep == 1 else 3
        mlp += copies * size * shape.hidden * shape.experts_per_token + FP32_BYTES * shape.num_experts
    return norms + (attention + mlp) // how.tp


def logprob_bytes(shape: ModelShape, how: Training) -> int:
    """The logits of one chunk, which their gradient is written over; and the head's gradient, summed over the chunks."""
    if how.lora_parameters:
        return _logits_bytes(shape, how) // how.tp
    num_chunks = -(-how.micro_batch_tokens // how.logprob_chunk)
    head = shape.head_parameters * (how.value_bytes + (FP32_BYTES if num_chunks > 1 else 0))
    return (_logits_bytes(shape, how) + head) // how.tp


def _logits_bytes(shape: ModelShape, how: Training) -> int:
    """The logits of one chunk. Where they are capped the capped ones, in fp32, and their gradient are held beside them."""
    capped = FP32_BYTES + how.value_bytes if shape.family in _SOFTCAPPED else 0
    return min(how.logprob_chunk, how.micro_batch_tokens) * shape.vocabulary * (how.value_bytes + capped)


def forward_bytes(shape: ModelShape, *, num_tokens: int, value_bytes: int) -> int:
    """What a pass without gradient holds at its widest place, which is in an MLP or a norm."""
    mlp = value_bytes * (3 * shape.mlp_width + 2 * shape.hidden)
    norm = (2 * FP32_BYTES + 2 * value_bytes) * shape.hidden
    attention = value_bytes * (4 * shape.query_width + 2 * shape.hidden)
    return num_tokens * max(mlp, norm, attention)


def engine_memory(
    shape: ModelShape,
    *,
    value_bytes: int,
    max_running: int,
    longest: int,
    num_requests: int,
    tp: int = 1,
    shares_weights: bool = False,
    in_fp8: bool = False,
    on_cpu: bool = False,
    cache_bytes: int | None = None,
) -> RoleMemory:
    """The embedded engine: weights unless they are the trainer's own, the cache of what runs, and one step's work. `in_fp8`:
    the codes of its linear layers are its own in any case, and stand in the place of their weights.

    Of the `num_requests` of a step at most `max_running` run together, each up to `longest` tokens. `cache_bytes`: the budget
    of the cache, which on a GPU is allocated once and holds the contexts that are kept too.
    """
    running = min(max_running, num_requests)
    per_token = shape.kv_bytes_per_token(value_bytes) // tp
    cache = kv_cache_bytes(running, longest, per_token, on_cpu=on_cpu)
    step = forward_bytes(shape, num_tokens=min(PREFILL_TOKENS, num_requests * longest), value_bytes=value_bytes)
    logits = running * shape.vocabulary * (value_bytes + 2 * FP32_BYTES)
    caches = {
        "KV cache": cache,
        "kept contexts": min(MAX_CACHED_BYTES, num_requests * longest * per_token),
    }
    if cache_bytes is not None:
        caches = caches | {"KV cache": min(cache, cache_bytes)} if on_cpu else {"KV cache": cache_bytes}
    plain = shape.num_parameters - (shape.linear_parameters if in_fp8 else 0)
    weights = {
        "weights": 0 if shares_weights else plain * value_bytes // tp,
        "fp8 codes": int(shape.linear_parameters * CODE_BYTES) if in_fp8 else 0,
    }
    return RoleMemory(
        held=_nonzero(weights),
        working=_nonzero(caches | {"engine step": (step + logits) // tp}),
    )


def kv_cache_bytes(num_running: int, longest: int, bytes_per_token: int, *, on_cpu: bool) -> int:
    """Keys and values of the running sequences at their longest: slots on a CPU, whole pages on a GPU."""
    if on_cpu:
        return num_running * longest * bytes_per_token
    return max(FIRST_PAGES, num_running * -(-longest // PAGE_TOKENS)) * PAGE_TOKENS * bytes_per_token


def pooled_engine_memory(shape: ModelShape, *, value_bytes: int, tp: int, pool_bytes: int, longest: int) -> RoleMemory:
    """vLLM and sglang take a pool of fixed size; what weights and one step leave of it is cache, for one sequence at least."""
    weights = shape.num_parameters * value_bytes // tp
    step = forward_bytes(shape, num_tokens=PREFILL_TOKENS, value_bytes=value_bytes) // tp
    cache = max(pool_bytes - weights - step, longest * shape.kv_bytes_per_token(value_bytes) // tp)
    return RoleMemory(held={"weights": weights}, working={"KV cache": cache, "engine step": step})


def _parameter_terms(shape: ModelShape, how: Training, *, total: int) -> Terms:
    if how.zero_stage is not None:
        return {"parameters": (total + how.lora_parameters) * how.value_bytes // (how.shards or 1)}
    if how.shards is None:
        return {"parameters": (total + how.lora_parameters) * how.value_bytes // how.tp}
    return {"parameters": (total + how.lora_parameters) * FP32_BYTES // how.cut}


def _zero_gradient_bytes(shape: ModelShape, how: Training, *, trained: int) -> int:
    """Stage 1 sums on every rank; the others send a layer's gradient on as soon as it is there."""
    if how.zero_stage == 1:
        return trained * (FP32_BYTES + (how.value_bytes if how.value_bytes < FP32_BYTES else 0))
    return trained * FP32_BYTES // how.zero_ranks + _layer_bytes(shape, how)


def _gathered_terms(shape: ModelShape, how: Training) -> Terms:
    """Layers that a sharded model has put together on a device: the one at work, the next, and the two ends."""
    if how.shards is None:
        return {}
    if not how.reshard:
        return {"gathered layers": shape.met_parameters(ep=how.ep) * how.value_bytes // how.tp}
    ends = shape.head_parameters * (1 if shape.is_tied else 2) * how.value_bytes // how.tp
    return {"gathered layers": 2 * _layer_bytes(shape, how) + ends}


def _layer_bytes(shape: ModelShape, how: Training) -> int:
    return shape.largest_layer_parameters(ep=how.ep) * how.value_bytes // how.tp


def _nonzero(terms: Terms) -> Terms:
    return {name: count for name, count in terms.items() if count}
