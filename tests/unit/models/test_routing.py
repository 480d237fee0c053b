"""Experts that were noted are taken again: as Hugging Face's own forward chooses them, and as it computes with them."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel

from reroll.config.parts import LoraConfig, OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import ModelError
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.attention import PackedAttention, hidden_states
from reroll.models.load import load_model, load_tokenizer
from reroll.models.routing import ReplayedRoutes, route_shape, unknown
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Needs, required
from reroll.training.loss import SFT_LOSS
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Completion, Request, Sample, SamplingParams
from reroll_zoo.expert_routes.families import FAMILIES
from reroll_zoo.tiny_models import make_tiny

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))  # scripts, no package

from model_families import FAMILIES as TINY

FORCED = {"qwen3_moe": "softmax", "deepseek_v3": "sigmoid", "gpt_oss": "logits"}
"""How the families turn scores into weights that the quick tests have, and what Hugging Face is made to compute below."""
PROMPT, OTHER = tuple(range(5, 22)), tuple(range(40, 60))


def tiny(folder: Path, family: str, **options: Any) -> str:
    shape: dict[str, Any] = {"hidden": 32, "layers": 3, "initializer_range": 0.2, "max_positions": 128} | TINY[family] | options
    return str(make_tiny(folder, family=family, **shape))  # type: ignore[arg-type]


def ours(folder: str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    return load_model(folder, dtype=dtype, device="cpu", **options)


def plain(folder: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()  # type: ignore[no-any-return]


def routers(model: PreTrainedModel) -> list[nn.Module]:
    blocks = [dict(module.named_children()) for module in model.modules()]
    return [block.get("gate", block.get("router")) for block in blocks if "experts" in block]  # type: ignore[misc]


def write(folder: str, requests: list[Request]) -> dict[str, Completion]:
    return finish(EmbeddedEngine(ours(folder), load_tokenizer(folder), max_running=3, notes_routes=True), requests)


def finish(engine: EmbeddedEngine, requests: list[Request]) -> dict[str, Completion]:
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


def ask(name: str, prompt: tuple[int, ...], **options: Any) -> Request:
    return Request(
        id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=9, min_tokens=9, seed=ord(name[0])), **options
    )


@torch.no_grad()
def chosen_by(model: PreTrainedModel, ids: tuple[int, ...]) -> Tensor:
    """[T, layers, top_k], sorted: what Hugging Face's own forward chooses for these tokens."""
    seen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _, inputs, output: seen.append(output[2])) for router in routers(model)]
    model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).sort(-1).values


def by_family(quick: set[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in FAMILIES]


@pytest.mark.parametrize("family", by_family({"qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"}))
def test_the_engine_tells_the_experts_that_hugging_face_chooses_and_they_can_be_replayed(tmp_path: Path, family: str) -> None:
    folder = tiny(tmp_path, family)
    model = plain(folder)
    wrote = write(folder, [ask("a", PROMPT), ask("b", PROMPT), ask("c", OTHER)])
    for name, prompt in {"a": PROMPT, "b": PROMPT, "c": OTHER}.items():
        assert wrote[name].routes is not None
        read = (*prompt, *wrote[name].token_ids)[:-1]
        assert torch.equal(torch.from_numpy(wrote[name].routes).long().sort(-1).values, chosen_by(model, read))
    trainer = ours(folder)
    ids = torch.tensor(read)
    routes = torch.from_numpy(wrote["c"].routes)
    where = (trainer, ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
    replayed = ReplayedRoutes(trainer, routes)
    torch.testing.assert_close(hidden_states(*where, replayed), hidden_states(*where), atol=1e-5, rtol=1e-5)
    assert not replayed.differing().any()
    other = random_routes(trainer, len(ids))
    replayed = ReplayedRoutes(trainer, other)
    seen: list[Tensor] = []
    for block in trainer.modules():
        if isinstance(experts := dict(block.named_children()).get("experts"), nn.Module):
            experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    hidden_states(*where, replayed).square().sum().backward()
    assert torch.equal(torch.stack(seen, 1), other.long())
    assert replayed.differing().mean() > 0.5
    for router in routers(trainer):
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in router.parameters())


def random_routes(model: PreTrainedModel, num_tokens: int, seed: int = 0) -> Tensor:
    shape, generator = route_shape(model), torch.Generator().manual_seed(seed)
    num_experts = routers(model)[0].num_experts
    scores = torch.rand(num_tokens, shape.num_layers, num_experts, generator=generator)  # type: ignore[call-overload]
    return scores.topk(shape.top_k).indices.to(shape.dtype)


def force(model: PreTrainedModel, kind: str, routes: Tensor) -> None:
    """Hugging Face's model, made to take these experts for the tokens of one sequence."""
    for layer, router in enumerate(routers(model)):

        def forward(hidden: Tensor, router: Any = router, chosen: Tensor = routes[:, layer].long()) -> tuple[Tensor, ...]:
            scores = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None))
            if kind == "logits":
                return scores, scores.gather(1, chosen).softmax(-1), chosen
            weights = (scores.sigmoid() if kind == "sigmoid" else scores.softmax(-1)).gather(1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return scores, weights * getattr(router, "routed_scaling_factor", 1.0), chosen

        router.forward = forward


def siblings(model: PreTrainedModel) -> Batch:
    """Two prompts of two siblings each, whose shared tokens go the same way."""
    rng, samples = np.random.default_rng(0), []
    for number, length in enumerate((9, 6)):
        prompt, to = rng.integers(4, 90, size=length), random_routes(model, length, seed=number).numpy()
        for more in (5, 8):
            ids = np.concatenate([prompt, rng.integers(4, 90, size=more)])
            routes = np.concatenate([to, random_routes(model, more, seed=10 * number + more).numpy()])
            mask = np.arange(len(ids)) >= length
            zeros = np.zeros(len(ids), np.float32)
            samples.append(Sample(ids=ids, loss_mask=mask, logp=zeros, turn=np.where(mask, 0, -1), routes=routes))
    return pack(samples)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FORCED)
def test_log_probs_and_gradients_are_hugging_faces_own_by_way_of_these_experts(
    tmp_path: Path, family: str, checkpointing: bool
) -> None:
    folder = tiny(tmp_path, family, layers=2)
    model = ours(folder)
    batch = siblings(model)
    config = TorchStrategyConfig(precision="fp32", gradient_checkpointing=checkpointing)
    strategy = TorchStrategy(model, load_tokenizer(folder), config, OptimConfig(), total_steps=2)
    logp = required(strategy.forward(batch, Needs()).logp)
    stats = strategy.forward_backward(batch, SFT_LOSS).values_by_name()
    oracle, bounds, total = plain(folder), batch.cu_seqlens.tolist(), torch.tensor(0.0)
    for start, end in pairwise(bounds):
        force(oracle, FORCED[family], required(batch.routes)[start:end])
        said = oracle(batch.ids[None, start:end], use_cache=False).logits[0, :-1].log_softmax(-1)
        own = said.gather(1, batch.ids[start + 1 : end, None])[:, 0] * batch.loss_mask[start + 1 : end]
        torch.testing.assert_close(logp[start + 1 : end], own.detach(), atol=2e-5, rtol=1e-4)
        total = total - own.sum()
    (total / batch.num_loss_tokens).backward()
    assert stats["routes_differ"] > 0.3
    for name, parameter in model.named_parameters():
        expected = oracle.get_parameter(name).grad
        torch.testing.assert_close(
            parameter.grad, expected, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_an_adapter_learns_over_replayed_experts_and_is_left_out_with_them_kept(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen3_moe", layers=2)
    model = ours(folder, lora=LoraConfig(rank=4))
    batch = siblings(model)
    strategy = TorchStrategy(
        model, load_tokenizer(folder), TorchStrategyConfig(precision="fp32"), OptimConfig(lr=1e-2), total_steps=2
    )
    start = required(strategy.forward(batch, Needs()).logp)
    strategy.forward_backward(batch, SFT_LOSS)
    strategy.optim_step()
    assert (required(strategy.forward(batch, Needs()).logp) - start).abs().max() > 1e-3
    torch.testing.assert_close(required(strategy.forward(batch, Needs(adapter=False)).logp), start)
    free = required(strategy.forward(batch.replace(routes=None), Needs(adapter=False)).logp)
    assert (free - start).abs().max() > 1e-2


def test_tokens_whose_experts_are_not_known_choose_for_themselves(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen3_moe", layers=2)
    model = ours(folder)
    batch = siblings(model)
    routes = required(batch.routes)
    strategy = TorchStrategy(model, load_tokenizer(folder), TorchStrategyConfig(precision="fp32"), OptimConfig(), total_steps=2)
    free = required(strategy.forward(batch.replace(routes=None), Needs()).logp)
    answer = strategy.forward(batch.replace(routes=torch.full_like(routes, unknown(routes.dtype))), Needs())
    torch.testing.assert_close(required(answer.logp), free)
    assert not required(answer.routes_differ).any()


def test_more_experts_than_a_byte_can_name_take_two(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen3_moe", layers=1, num_experts=256, moe_intermediate_size=4)
    routes = write(folder, [ask("a", PROMPT)])["a"].routes
    assert routes is not None
    assert (routes.dtype, routes.shape) == (np.int16, (len(PROMPT) + 8, 1, 2))
    assert routes.max() > 127


def test_what_cannot_be_replayed_is_refused_with_the_reason(tmp_path: Path) -> None:
    dense = ours(tiny(tmp_path / "dense", "llama"))
    with pytest.raises(ModelError, match="not llama: leave out"):
        route_shape(dense)
    grouped = ours(tiny(tmp_path / "grouped", "deepseek_v2", topk_method="group_limited_greedy"))
    with pytest.raises(ModelError, match="no score for an expert outside the groups"):
        route_shape(grouped)
    model = ours(tiny(tmp_path / "moe", "qwen3_moe"))
    with pytest.raises(ModelError, match="1 layers with 2 experts each were noted, and this model has 3 with 2"):
        ReplayedRoutes(model, torch.zeros(4, 1, 2, dtype=torch.uint8))
