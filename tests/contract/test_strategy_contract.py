"""What every Strategy must do. Plain transformers is the oracle of the values, fp32 `torch` that of the others."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from reroll.config.parts import LoraConfig, ModelConfig, OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import ModelError, RunFolderError, TrainingDiverged
from reroll.models.load import DTYPES, load_model, load_tokenizer
from reroll.models.lora import add_lora
from reroll.observe.metrics import Stats
from reroll.tokens.batch import Batch, pack
from reroll.training.base import LossOutput, Needs, Predictions, Strategy, required
from reroll.training.loss import SFT_LOSS
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Sample
from reroll_zoo.deepspeed.config import DeepspeedConfig
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.fsdp2.strategy import Fsdp2Strategy
from reroll_zoo.host_optimizer.strategy import HostOptimizerStrategy
from reroll_zoo.ranks.empty_model import skeleton
from reroll_zoo.ranks.group import join_process_group
from reroll_zoo.tiny_models import make_tiny

KINDS: dict[str, dict[str, Any]] = {
    "torch-fp32": {"precision": "fp32"},
    "torch-bf16": {"precision": "bf16"},
    "torch-fp32-checkpointed": {"precision": "fp32", "gradient_checkpointing": True, "logprob_chunk": 5},
    "torch-fp32-lora": {"precision": "fp32"},
    "torch-bf16-lora": {"precision": "bf16"},
    "torch-fp32-checkpointed-lora": {"precision": "fp32", "gradient_checkpointing": True, "logprob_chunk": 5},
    "torch-bf16-host": {"precision": "bf16", "optimizer": "host"},
    "fsdp2-bf16": {"precision": "bf16"},
    "fsdp2-fp32-checkpointed": {"precision": "fp32", "gradient_checkpointing": True, "logprob_chunk": 5},
    "fsdp2-bf16-lora": {"precision": "bf16"},
    "deepspeed-bf16": {"precision": "bf16", "stage": 3},
    "deepspeed-bf16-checkpointed-lora": {"precision": "bf16", "stage": 2, "gradient_checkpointing": True, "logprob_chunk": 5},
}
"""One rank each; tests/invariant holds several ranks to one."""
LORA = LoraConfig(rank=8, alpha=16)
TOLERANCE = {"fp32": 1e-5, "bf16": 0.05}

Make = Callable[..., Strategy]


FAMILIES = ("llama", "qwen3")


def kinds_and_families() -> Iterator[Any]:
    """The first kind with every family, the others with one each, in turn: the rest with -m slow."""
    for number, kind in enumerate(KINDS):
        for family in FAMILIES:
            is_quick = number == 0 or family == FAMILIES[number % len(FAMILIES)]
            yield pytest.param((kind, family), id=f"{family}-{kind}", marks=() if is_quick else pytest.mark.slow)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_tiny(tmp_path_factory.mktemp("tiny"), family=family) for family in FAMILIES}


@pytest.fixture(params=kinds_and_families())
def kind_and_family(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def kind(kind_and_family: tuple[str, str]) -> str:
    return kind_and_family[0]


@pytest.fixture
def folder(kind_and_family: tuple[str, str], folders: dict[str, Path]) -> Path:
    return folders[kind_and_family[1]]


@pytest.fixture
def precision(kind: str) -> str:
    return str(KINDS[kind]["precision"])


@pytest.fixture
def lora(kind: str) -> LoraConfig | None:
    return LORA if kind.endswith("-lora") else None


@pytest.fixture
def oracle(folder: Path, lora: LoraConfig | None) -> nn.Module:
    """Plain transformers, with peft's layers in it for the kinds that train an adapter."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if lora:
        add_lora(model, lora, base=str(folder))
    return model


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    """What a process with one rank joins before it builds a strategy of several."""
    join_process_group(None, rank=0, world_size=1, device="cpu")
    yield
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()  # Which forgets, too, what DeepSpeed has made of the group.
    else:
        dist.destroy_process_group()


@pytest.fixture
def make(kind: str, lora: LoraConfig | None, folder: Path) -> Make:
    def build(model: Path = folder, **optim: Any) -> Strategy:
        settings = OptimConfig(**{"lr": 1e-3} | optim)
        tokenizer, precision = load_tokenizer(str(model)), DTYPES[KINDS[kind]["precision"]]
        full = load_model(str(model), dtype=precision, device="cpu", lora=lora)
        if kind.startswith("torch"):
            node = TorchStrategyConfig(**KINDS[kind])
            made = HostOptimizerStrategy if node.optimizer == "host" else TorchStrategy
            return made(full, tokenizer, node, settings, total_steps=100)
        strategy = (Fsdp2StrategyConfig if kind.startswith("fsdp2") else DeepspeedConfig)(
            kind=kind.split("-")[0], **KINDS[kind]
        )
        config = ModelConfig(model=str(model), strategy=strategy, lora=lora)
        empty = partial(skeleton, config, tokenizer, head="language")
        if isinstance(strategy, DeepspeedConfig):
            pytest.importorskip("deepspeed")
            from reroll_zoo.deepspeed.strategy import DeepspeedStrategy

            return DeepspeedStrategy(empty, full, tokenizer, strategy, settings, device="cpu", total_steps=100)
        return Fsdp2Strategy(empty, full, tokenizer, strategy, settings, device="cpu", total_steps=100)

    return build


def batch(lengths: tuple[int, ...] = (9, 4, 17, 12), *, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        mask = np.arange(length) >= length // 2
        zeros = np.zeros(length, dtype=np.float32)
        ids = rng.integers(4, 90, size=length)
        samples.append(Sample(ids=ids, loss_mask=mask, logp=zeros, turn=np.where(mask, 0, -1)))
    return pack(samples)


def logprobs(strategy: Strategy, packed: Batch) -> Tensor:
    return required(strategy.forward(packed, Needs()).logp)


@dataclass
class SumLoss:
    """Minus the sum of all log-probs, times a factor; keeps what it saw."""

    factor: float = 1.0
    seen: Tensor | None = None
    needs: Needs = field(default_factory=Needs)
    compares_with_old_policy: bool = False

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def __call__(self, batch: Batch, model: Predictions) -> LossOutput:
        logp = required(model.logp)
        self.seen = logp.detach()
        return LossOutput(-logp.sum() * self.factor, Stats())


def copy_of(strategy: Strategy, *, frozen: bool = False) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in strategy.weights(frozen=frozen).items()}


def train(strategy: Strategy, steps: int, *, seed: int = 0) -> list[float]:
    losses = []
    for step in range(steps):
        stats = strategy.forward_backward(batch(seed=seed + step), SFT_LOSS) + strategy.optim_step()
        losses.append(stats["loss"].value)
    return losses


def test_logprobs_are_those_of_plain_transformers_run_sequence_by_sequence(
    make: Make, oracle: nn.Module, precision: str
) -> None:
    packed = batch()
    expected = torch.zeros(packed.num_tokens)
    for start, end in zip(packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True):
        ids = packed.ids[start:end]
        with torch.no_grad():
            logp = oracle(ids[None]).logits[0, :-1].log_softmax(-1)
        expected[start + 1 : end] = logp.gather(1, ids[1:, None]).squeeze(1)
    logp = logprobs(make(), packed)
    assert (logp.dtype, logp.requires_grad) == (torch.float32, False)
    assert not logp[~packed.loss_mask].any()
    tolerance = TOLERANCE[precision]
    torch.testing.assert_close(logp[packed.loss_mask], expected[packed.loss_mask], atol=tolerance, rtol=tolerance)


def test_logprobs_follow_the_batchs_temperature(make: Make) -> None:
    strategy, packed = make(), batch()
    cold = logprobs(strategy, packed.replace(temperature=0.5))
    assert not torch.allclose(cold, logprobs(strategy, packed), atol=1e-3)


def test_the_loss_sees_the_logprobs_that_forward_gives(make: Make) -> None:
    strategy, packed, loss = make(), batch(), SumLoss()
    expected = logprobs(strategy, packed)
    strategy.forward_backward(packed, loss)
    assert loss.seen is not None
    assert torch.equal(loss.seen, expected)


def test_training_lowers_the_loss_of_what_it_trains_on(make: Make, lora: LoraConfig | None) -> None:
    strategy = make(lr=1e-2)
    losses = []
    for _ in range(8):
        stats = strategy.forward_backward(batch(), SFT_LOSS) + strategy.optim_step()
        losses.append(stats["loss"].value)
    # Under an adapter the head stays as it is, and this random one cannot say anything loudly.
    assert losses[-1] < (0.8 if lora else 0.6) * losses[0]


def test_a_step_follows_adamw_on_the_clipped_gradient(make: Make, oracle: nn.Module, precision: str) -> None:
    """Plain transformers and torch, step by step, with a clip that bites."""
    strategy = make(clip_norm=0.1, lr=1e-3, weight_decay=0.1)
    packed = batch((9,))
    loss = -oracle(packed.ids[None]).logits[0, :-1].log_softmax(-1).gather(1, packed.ids[1:, None]).squeeze(1)
    loss[packed.loss_mask[1:]].mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
    decay = [parameter for parameter in oracle.parameters() if parameter.requires_grad and parameter.ndim > 1]
    plain = [parameter for parameter in oracle.parameters() if parameter.requires_grad and parameter.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)).step()

    stats = strategy.forward_backward(packed, SFT_LOSS) + strategy.optim_step()
    assert stats["grad_norm"].value == pytest.approx(norm.item(), rel=1e-4 if precision == "fp32" else 0.05)
    weights = {**strategy.weights(), **strategy.weights(frozen=True)}
    for name, expected in oracle.named_parameters():
        # Adam's first step is sign-like where the gradient is nearly zero, so a few entries may differ by the step itself.
        far = (weights[name].float() - expected).abs() > (1e-6 if precision == "fp32" else 1e-2)
        assert far.float().mean() < 0.01


def test_gradients_are_zero_again_after_a_step(make: Make) -> None:
    strategy = make(weight_decay=0.0)
    train(strategy, 1)
    assert strategy.optim_step()["grad_norm"].value == 0.0


def test_a_gradient_that_is_not_finite_raises_and_leaves_the_weights_untouched(make: Make) -> None:
    strategy = make()
    train(strategy, 1)
    before = copy_of(strategy)
    strategy.forward_backward(batch(), SumLoss(factor=float("nan")))
    with pytest.raises(TrainingDiverged, match="step 1 is not finite"):
        strategy.optim_step()
    assert all(torch.equal(before[name], weight) for name, weight in strategy.weights().items())
    assert np.isfinite(train(strategy, 1)).all()


def test_saved_loaded_and_continued_is_the_same_as_uninterrupted(make: Make, tmp_path: Path) -> None:
    whole, first, second = (make(schedule="cosine", warmup_steps=2) for _ in range(3))
    expected = train(whole, 4)
    train(first, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    assert train(second, 2, seed=2) == expected[2:]
    weights = second.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in whole.weights().items())


def test_what_was_staged_is_the_checkpoint_of_that_moment_whatever_is_trained_before_it_is_written(
    make: Make, tmp_path: Path
) -> None:
    first, second = make(), make()
    train(first, 2)
    first.save(tmp_path / "saved")
    write = first.stage(tmp_path / "staged")
    expected = train(first, 2, seed=2)
    write()
    weights = [next((tmp_path / name).glob("*model.safetensors")) for name in ("saved", "staged")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    second.load(tmp_path / "staged")
    assert train(second, 2, seed=2) == expected


def test_a_writer_names_every_file_that_it_has_written(make: Make, tmp_path: Path) -> None:
    strategy = make()
    train(strategy, 1)
    files = strategy.save(tmp_path / "saved")
    assert sorted(files) == sorted(path for path in (tmp_path / "saved").rglob("*") if path.is_file())
    files = strategy.stage(tmp_path / "staged")()
    assert sorted(files) == sorted(path for path in (tmp_path / "staged").rglob("*") if path.is_file())


STATES = {"torch": "trainer.pt", "fsdp2": "shards/__0_0.distcp", "deepspeed": "zero/unit-00000.pt"}


def test_what_cannot_be_gone_on_from_is_refused_as_such(make: Make, kind: str, tmp_path: Path) -> None:
    strategy = make()
    train(strategy, 1)
    strategy.save(tmp_path / "saved")
    wide = make(make_tiny(tmp_path / "wide", hidden=128))
    with pytest.raises((RunFolderError, ModelError), match=r"another model|this model's adapter"):
        wide.load(tmp_path / "saved")
    file = tmp_path / "saved" / STATES[kind.split("-")[0]]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(RunFolderError, match=r"cannot go on from .*damaged"):
        make().load(tmp_path / "saved")
    with pytest.raises(RunFolderError, match=r"was not written by strategy|this one trains an adapter"):
        strategy.load(tmp_path / "wide")


def test_a_checkpoint_opens_with_plain_transformers_or_peft_and_has_the_same_logits(
    make: Make, lora: LoraConfig | None, tmp_path: Path, precision: str
) -> None:
    strategy, packed = make(), batch((9,))
    train(strategy, 3)
    strategy.save(tmp_path)
    model = (peft.AutoPeftModelForCausalLM if lora else AutoModelForCausalLM).from_pretrained(tmp_path).eval()
    parameters = {name.removeprefix("base_model.model."): parameter for name, parameter in model.named_parameters()}
    for name, weight in strategy.weights().items():
        assert torch.equal(parameters[name].to(weight.dtype), weight)
    with torch.no_grad():
        logp = model(packed.ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, packed.ids[1:, None]).squeeze(1)
    ours = logprobs(strategy, packed)[packed.loss_mask]
    tolerance = TOLERANCE[precision]
    torch.testing.assert_close(ours, logp[packed.loss_mask[1:]], atol=tolerance, rtol=tolerance)
    assert load_tokenizer(str(tmp_path)).chat_template


def test_weights_are_references_that_see_the_next_step_where_the_strategy_holds_them_whole(make: Make, kind: str) -> None:
    if not kind.startswith("torch"):
        pytest.skip("the weights are gathered from shards")
    strategy = make()
    weights = strategy.weights()
    before = {name: weight.clone() for name, weight in weights.items()}
    train(strategy, 1)
    assert any(not torch.equal(before[name], weight) for name, weight in weights.items())
    assert all(weight.data_ptr() == strategy.weights()[name].data_ptr() for name, weight in weights.items())
    assert not any(weight.requires_grad for weight in weights.values())


def test_trained_and_frozen_weights_are_together_the_models(make: Make, oracle: nn.Module, lora: LoraConfig | None) -> None:
    strategy = make()
    trained, frozen = set(strategy.weights()), set(strategy.weights(frozen=True))
    assert trained | frozen == {name for name, _ in oracle.named_parameters()}
    assert not trained & frozen
    assert bool(frozen) == bool(lora)


def test_frozen_weights_are_bitwise_unchanged_by_training(make: Make) -> None:
    strategy = make()
    before = copy_of(strategy, frozen=True)
    train(strategy, 2)
    assert all(torch.equal(before[name], weight) for name, weight in strategy.weights(frozen=True).items())


def test_asked_without_its_adapter_a_trained_model_is_the_one_it_started_from(make: Make, lora: LoraConfig | None) -> None:
    strategy, packed = make(), batch()
    start = logprobs(strategy, packed)
    train(strategy, 2)
    without = required(strategy.forward(packed, Needs(adapter=False)).logp)
    assert not torch.equal(logprobs(strategy, packed), start)
    assert torch.equal(without, start if lora else logprobs(strategy, packed))
    train(strategy, 1)  # And the adapter can still be trained.
    assert not torch.equal(logprobs(strategy, packed), start)


def test_moving_keeps_training_going(make: Make) -> None:
    moved, still = make(), make()
    train(moved, 1)
    train(still, 1)
    moved.to("cpu")
    assert train(moved, 1, seed=1) == train(still, 1, seed=1)
