"""A model as reroll runs it beside Hugging Face's own with eager attention: log-probs, gradients, a training step, tokens."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from reroll.config.parts import LoraConfig, OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import ModelError
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model, load_tokenizer, resolve_model
from reroll.models.quantized import dequantizing, forget_quantization
from reroll.tokens.batch import pack
from reroll.training.loss import SFT_LOSS
from reroll.training.predict import token_states
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Completion, Request, Sample, SamplingParams

TOLERANCE = 1e-4
"""Of log-probs in fp32, and of gradients as a share of each weight's largest one."""
HALF_TOLERANCE = 3.0
"""Of gaps in bf16, in units of Hugging Face's own: where experts are chosen, rounding sends tokens elsewhere."""
_TOLD_CHARACTERS = 300
_ROUNDINGS = 30
"""The weights are moved once, and a pass rounds at every operation."""
LENGTHS = (3, 30, 1, 11)
NUM_TOKENS = 12
LORA = LoraConfig(rank=4, alpha=8)
OPTIM = OptimConfig(lr=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The largest gaps between a model here and Hugging Face's own, with eager attention. None: not measured."""

    refused: str = ""
    """Why it is refused altogether."""
    broken: str = ""
    """What was raised, where something was."""
    packed: float | None = None
    """Log-probs of sequences packed into one row, against each alone."""
    siblings: float | None = None
    """Log-probs of sequences that begin alike, their common beginning computed once, against each alone."""
    gradient: float | None = None
    """Gradients of the packed log-probs, of every weight, as a share of its largest one."""
    gradient_rounding: float = 0.0
    """How far the last bits of the weights move Hugging Face's own gradients."""
    step: float | None = None
    """Log-probs after one step of AdamW."""
    step_rounding: float = 0.0
    """How far the last bits of the weights move Hugging Face's own."""
    lora_refused: str = ""
    """Why it takes no adapter."""
    lora: float | None = None
    """Log-probs with an adapter, against weights into which it is multiplied."""
    engine_refused: str = ""
    """Why the embedded engine refuses it."""
    engine: float | None = None
    """Log-probs that the embedded engine reports of tokens that it wrote."""
    pushed: float | None = None
    """The same, after new weights were pushed."""
    num_same: int = 0
    """Of the prompts: how many were greedily continued with the same tokens as by `generate`."""
    cache: str = ""
    """What holds the engine's keys and values."""
    half: float | None = None
    """Packed log-probs in bf16, against Hugging Face's in fp32: their mean gap as a multiple of that of its own in bf16."""
    engine_half: float | None = None
    """The same of the log-probs that the engine reports in bf16."""

    @property
    def agrees(self) -> bool:
        """Whether all that is not refused is as it should be."""
        gaps = (self.packed, self.siblings, self.engine, self.pushed, self.lora)
        trains = is_rounding(self.gradient or 0.0, self.gradient_rounding) and is_rounding(self.step or 0.0, self.step_rounding)
        has_same_tokens = self.engine_refused != "" or self.num_same == len(LENGTHS)
        rounds = max(self.half or 0.0, self.engine_half or 0.0) <= HALF_TOLERANCE
        is_small = max(gap or 0.0 for gap in gaps) <= TOLERANCE
        return not self.refused and not self.broken and is_small and trains and has_same_tokens and rounds


def is_rounding(gap: float, rounding: float = 0.0) -> bool:
    """Whether a gap is none of the arithmetic. `rounding`: how far the last bits of the weights move the same numbers; depth
    and Adam, which divides by the size of a gradient, amplify them."""
    return gap <= max(TOLERANCE, _ROUNDINGS * rounding)


def measure(
    name: str,
    *,
    training: bool = False,
    half: bool = False,
    device: str = "cpu",
    on_part: Callable[[str], None] = lambda part: None,
) -> Measured:
    """Compare the model of this folder in fp32. With `training` also after a step of the trainer and with an adapter, and
    with `half` in bf16, for which the model is loaded again. `on_part` is told what begins.

    A part that breaks is told, and the others are measured all the same.
    """
    parts: dict[str, Callable[[str, str], dict[str, Any]]] = {
        "packed log-probs and gradients": _training_gaps,
        "the embedded engine": _engine_gaps,
    }
    parts |= {"a training step": _step_gaps, "an adapter": _lora_gap} if training else {}
    parts |= {"bf16": half_gaps} if half else {}
    found: dict[str, Any] = {}
    with _whole_fp32():
        for part, compare in parts.items():
            on_part(part)
            try:
                found |= compare(name, device)
            except Exception as error:
                if isinstance(error, ModelError) and not found:
                    return Measured(refused=str(error))
                if not found.get("broken"):  # What follows may follow from it.
                    found["broken"] = f"{part}: {_told(error)}"
    return Measured(**found)


@contextmanager
def _whole_fp32() -> Iterator[None]:
    """Convolutions of a GPU in fp32, as its matrix products are."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def _told(error: Exception) -> str:
    """What was raised and where, in a line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(str(error).split())[:_TOLD_CHARACTERS]
    return f"{type(error).__name__} at {'/'.join(Path(place.filename).parts[-2:])}:{place.lineno}: {reason}"


def _plain(name: str, device: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    source = resolve_model(name)
    plainly = dequantizing(source)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="eager", **plainly)
    if plainly:
        forget_quantization(model, dtype)
    return model.to(device).eval()  # type: ignore[no-any-return, arg-type]


def _engine_gaps(name: str, device: str) -> dict[str, Any]:
    """Tokens and log-probs of the engine before and after a push."""
    plain = _plain(name, device)
    sequences = _sequences(plain)
    try:
        engine = EmbeddedEngine(load_model(name, dtype=torch.float32, device=device), load_tokenizer(name), max_running=3)
        wrote = _write(engine, sequences)
    except ModelError as error:
        return {"engine_refused": str(error)}
    num_same = sum(
        list(completion.token_ids) == _generate(plain, ids) for ids, completion in zip(sequences, wrote, strict=True)
    )
    gap = _engine_gap(plain, sequences, wrote)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.01)
    engine.load_weights({key: weight.detach().clone() for key, weight in plain.named_parameters()}, version=1)
    pushed = _engine_gap(plain, sequences, _write(engine, sequences))
    cache = type(engine.backend).__name__.removesuffix("Backend").lower()
    return {"engine": gap, "num_same": num_same, "pushed": pushed, "cache": cache}


@torch.no_grad()
def half_gaps(name: str, device: str) -> dict[str, Any]:
    """How far trainer and engine are in bf16 from Hugging Face's own in fp32, in units of how far that is in bf16."""
    exact, rough = (_plain(name, device, dtype) for dtype in (torch.float32, torch.bfloat16))
    ours = load_model(name, dtype=torch.bfloat16, device=device)
    sequences = _sequences(exact)
    want, theirs, got = _alone_logp(exact, sequences), _alone_logp(rough, sequences), _packed_logp(ours, sequences)
    found = {"half": float((got - want).abs().mean() / (theirs - want).abs().mean())}
    try:
        wrote = _write(EmbeddedEngine(ours, load_tokenizer(name), max_running=3), sequences)
    except ModelError:
        return found  # That it is refused has been told.
    want, theirs = (_logp_of(model, sequences, wrote) for model in (exact, rough))
    told = torch.tensor([logprob for completion in wrote for logprob in completion.logprobs])
    return found | {"engine_half": float((told - want).abs().mean() / (theirs - want).abs().mean())}


def _sequences(model: PreTrainedModel) -> list[Tensor]:
    generator, vocab_size = torch.Generator().manual_seed(0), model.config.get_text_config().vocab_size
    return [torch.randint(4, vocab_size, (length,), generator=generator).to(model.device) for length in LENGTHS]


def _packed_logp(model: PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    """[T, vocabulary], as the trainer computes it."""
    ids, device = torch.cat(list(sequences)), model.device
    positions = torch.cat([torch.arange(len(each), device=device) for each in sequences])
    bounds = torch.tensor([0, *map(len, sequences)], device=device).cumsum(0)
    return logits(model, hidden_states(model, ids, positions, PackedAttention(bounds))).float().log_softmax(-1)


def _alone_logp(plain: PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    """[T, vocabulary], as Hugging Face computes it."""
    return torch.cat([plain(each[None], use_cache=False).logits[0] for each in sequences]).float().log_softmax(-1)


def _training_gaps(name: str, device: str) -> dict[str, float]:
    ours, plain = load_model(name, dtype=torch.float32, device=device), _plain(name, device)
    sequences = _sequences(plain)
    got, want = _packed_logp(ours, sequences), _alone_logp(plain, sequences)
    gradients = [_gradients(model, logp, sequences) for model, logp in ((ours, got), (plain, want))]
    weights = [parameter.detach().clone() for parameter in plain.parameters()]
    _nudge(plain)
    nudged = _gradients(plain, _alone_logp(plain, sequences), sequences)
    with torch.no_grad():
        for parameter, weight in zip(plain.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return {
        "packed": float((got - want).detach().abs().max()),
        "gradient": max(map(_share, *gradients)),
        "gradient_rounding": max(map(_share, gradients[1], nudged)),
        "siblings": _siblings_gap(ours, plain),
    }


def _gradients(model: PreTrainedModel, logp: Tensor, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Of the sum of the sequences' log-probs, for every weight."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(logp.gather(1, torch.cat(list(sequences))[:, None]).sum(), parameters, allow_unused=True)
    return [torch.zeros_like(one) if each is None else each for one, each in zip(parameters, found, strict=True)]


@torch.no_grad()
def _nudge(model: PreTrainedModel) -> None:
    """Move every weight by about its last bit."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8) * 2 - 1
        parameter.mul_(1 + signs.to(parameter.device) * torch.finfo(torch.float32).eps)


@torch.no_grad()
def _siblings_gap(ours: PreTrainedModel, plain: PreTrainedModel) -> float:
    longest, *others = sorted(_sequences(plain), key=len, reverse=True)
    siblings = [longest, *(torch.cat([longest[: len(longest) // 2], each]) for each in others)]
    states = token_states(ours, pack([_sample(each) for each in siblings]).to(str(ours.device)))
    return float((logits(ours, states.hidden).log_softmax(-1) - _alone_logp(plain, siblings)).abs().max())


def _share(ours: Tensor, plain: Tensor) -> float:
    """By how much two gradients differ, of the larger's largest entry. One below 1e-3 is taken for noise."""
    largest = max(float(ours.abs().max()), float(plain.abs().max()))
    return float((ours - plain).abs().max()) / max(largest, 1e-3)


def _step_gaps(name: str, device: str) -> dict[str, float]:
    """Between the log-probs after a step of the trainer on the mean cross-entropy, and of PyTorch's own AdamW."""
    ours = load_model(name, dtype=torch.float32, device=device)
    sequences = [each for each in _sequences(ours) if len(each) > 1]
    strategy = TorchStrategy(ours, load_tokenizer(name), TorchStrategyConfig(precision="fp32"), OPTIM, total_steps=10)
    batch = pack([_sample(each) for each in sequences])
    strategy.forward_backward(batch.replace(advantage=torch.ones_like(batch.advantage)), SFT_LOSS)
    strategy.optim_step()
    with torch.no_grad():
        got = _packed_logp(ours, sequences)
    del ours, strategy
    want, nudged = (_plain_step(name, device, sequences, nudges=nudges) for nudges in (False, True))
    return {"step": float((got - want).abs().max()), "step_rounding": float((nudged - want).abs().max())}


def _plain_step(name: str, device: str, sequences: Sequence[Tensor], *, nudges: bool) -> Tensor:
    plain = _plain(name, device)
    if nudges:
        _nudge(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.0)
    losses = [
        torch.nn.functional.cross_entropy(plain(each[None], use_cache=False).logits[0, :-1], each[1:], reduction="sum")
        for each in sequences
    ]
    (sum(losses) / sum(len(each) - 1 for each in sequences)).backward()  # type: ignore[union-attr]
    torch.nn.utils.clip_grad_norm_(plain.parameters(), OPTIM.clip_norm)
    optimizer.step()
    with torch.no_grad():
        return _alone_logp(plain, sequences)


def _sample(ids: Tensor) -> Sample:
    """All of it but the first token is trained on."""
    mask = np.arange(len(ids)) > 0
    return Sample(ids=ids.cpu().numpy(), loss_mask=mask, logp=np.zeros(len(ids), np.float32), turn=np.where(mask, 0, -1))


def _lora_gap(name: str, device: str) -> dict[str, Any]:
    """With an adapter that does something, in the trainer's pass, against the weights with A and B multiplied in."""
    try:
        ours = load_model(name, dtype=torch.float32, device=device, lora=LORA)
    except ModelError as error:
        return {"lora_refused": str(error)}
    plain, parameters = _plain(name, device), dict(ours.named_parameters())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key in [key for key in parameters if ".lora_A." in key]:
            first, second = parameters[key], parameters[key.replace(".lora_A.", ".lora_B.")]
            second.copy_(0.1 * torch.randn(second.shape, generator=generator).to(second.device))
            weight = plain.get_submodule(key.partition(".lora_A.")[0]).weight
            assert isinstance(weight, Tensor)
            weight += LORA.alpha / LORA.rank * second @ first
        sequences = _sequences(plain)
        return {"lora": float((_packed_logp(ours, sequences) - _alone_logp(plain, sequences)).abs().max())}


def _write(engine: EmbeddedEngine, sequences: Sequence[Tensor]) -> list[Completion]:
    """What it greedily makes of the sequences."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0)
    for number, ids in enumerate(sequences):
        engine.submit(Request(id=str(number), prompt_ids=tuple(ids.tolist()), sampling=sampling))
    done: dict[str, Completion] = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return [done[str(number)] for number in range(len(sequences))]


@torch.no_grad()
def _engine_gap(plain: PreTrainedModel, sequences: Sequence[Tensor], wrote: Sequence[Completion]) -> float:
    told = torch.tensor([logprob for completion in wrote for logprob in completion.logprobs])
    return float((_logp_of(plain, sequences, wrote) - told).abs().max())


def _logp_of(plain: PreTrainedModel, sequences: Sequence[Tensor], wrote: Sequence[Completion]) -> Tensor:
    """Of what was written after the sequences, as Hugging Face computes it; on the host."""
    found = []
    for ids, completion in zip(sequences, wrote, strict=True):
        new = torch.tensor(completion.token_ids, device=ids.device)
        logp = _alone_logp(plain, [torch.cat([ids, new])])[len(ids) - 1 : -1]
        found.append(logp.gather(1, new[:, None])[:, 0].cpu())
    return torch.cat(found)


def _generate(plain: PreTrainedModel, ids: Tensor) -> list[int]:
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    output: Tensor = plain.generate(ids[None], attention_mask=torch.ones_like(ids)[None], pad_token_id=0, **options)  # type: ignore[operator]
    return output[0, len(ids) :].tolist()
