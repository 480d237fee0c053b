"""Masters and moments in host memory: the same steps to the bit, and the same files, as beside the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from reroll.config.parts import LoraConfig, OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import ModelError, TrainingDiverged
from reroll.models.load import DTYPES, load_model, load_tokenizer
from reroll.tokens.batch import Batch, pack
from reroll.training.loss import SFT_LOSS
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Sample
from reroll_zoo.host_optimizer import memory, stream
from reroll_zoo.host_optimizer.memory import host_tensors
from reroll_zoo.host_optimizer.strategy import HostOptimizerStrategy
from reroll_zoo.tiny_models import make_tiny

KINDS: dict[str, type[TorchStrategy]] = {"gpu": TorchStrategy, "host": HostOptimizerStrategy}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), family="qwen3")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors are cut, and each slot is used again."""
    monkeypatch.setattr("reroll_zoo.host_optimizer.strategy.PIECE_VALUES", 256)


def strategy(where: str, folder: Path, *, precision: str = "bf16", lora: LoraConfig | None = None) -> TorchStrategy:
    model = load_model(str(folder), dtype=DTYPES[precision], device="cpu", lora=lora)  # type: ignore[index]
    if lora is not None:  # Else the two would start with adapters that differ.
        with torch.no_grad():
            for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
                if parameter.requires_grad:
                    parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(number))
    node = TorchStrategyConfig(precision=precision, optimizer=where)  # type: ignore[arg-type]
    optim = OptimConfig(lr=1e-3, weight_decay=0.1, clip_norm=0.5, warmup_steps=2)
    return KINDS[where](model, load_tokenizer(str(folder)), node, optim, total_steps=10)


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    samples = []
    for length in (9, 17, 12):
        mask = np.arange(length) >= 4
        zeros = np.zeros(length, dtype=np.float32)
        samples.append(Sample(ids=rng.integers(4, 90, size=length), loss_mask=mask, logp=zeros, turn=np.where(mask, 0, -1)))
    return pack(samples)


def train(learner: TorchStrategy, steps: range) -> list[float]:
    told = []
    for step in steps:
        for micro_batch in (2 * step, 2 * step + 1):
            learner.forward_backward(batch(micro_batch), SFT_LOSS)
        told.append(learner.optim_step()["grad_norm"].value)
    return told


def assert_equal(one: TorchStrategy, other: TorchStrategy) -> None:
    """Weights, masters and moments, to the bit."""
    theirs = dict(other.parts())
    for name, weight in one.parts().items():
        assert torch.equal(weight, theirs[name]), name
    mine, yours = one._state(), other._state()
    for name, master in mine["masters"].items():
        assert torch.equal(master, yours["masters"][name]), name
    assert mine["optimizer"]["param_groups"] == yours["optimizer"]["param_groups"]
    assert mine["optimizer"]["state"].keys() == yours["optimizer"]["state"].keys()
    for number, state in mine["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, yours["optimizer"]["state"][number][key]), (number, key)


@pytest.mark.parametrize(
    ("precision", "lora"), [("bf16", None), ("fp32", None), ("bf16", LoraConfig(rank=4)), ("fp32", LoraConfig(rank=4))]
)
def test_steps_through_host_memory_are_those_of_the_ordinary_optimizer_to_the_bit(
    folder: Path, precision: str, lora: LoraConfig | None
) -> None:
    ordinary, streamed = (strategy(where, folder, precision=precision, lora=lora) for where in KINDS)
    assert train(streamed, range(4)) == train(ordinary, range(4))
    assert_equal(streamed, ordinary)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("first", ["gpu", "host"])
def test_either_goes_on_from_what_the_other_saved(folder: Path, tmp_path: Path, first: str, precision: str) -> None:
    writer = strategy(first, folder, precision=precision)
    train(writer, range(2))
    writer.save(tmp_path)
    expected = train(writer, range(2, 4))
    for where in KINDS:
        reader = strategy(where, folder, precision=precision)
        train(reader, range(5, 6))  # What it holds is not to show.
        reader.load(tmp_path)
        assert train(reader, range(2, 4)) == expected
        assert_equal(reader, writer)


def test_a_checkpoint_from_before_the_first_step_forgets_the_moments(folder: Path, tmp_path: Path) -> None:
    fresh, reader = strategy("host", folder), strategy("host", folder)
    fresh.save(tmp_path)
    train(reader, range(2))
    reader.load(tmp_path)
    assert train(reader, range(2)) == train(fresh, range(2))
    assert_equal(reader, fresh)


def test_a_checkpoint_is_written_when_it_is_staged_and_holds_each_tensor_alone(folder: Path, tmp_path: Path) -> None:
    files = {}
    for where in KINDS:
        learner = strategy(where, folder)
        train(learner, range(2))
        write = learner.stage(tmp_path / where)
        assert (tmp_path / where / "trainer.pt").exists() == (where == "host")
        files[where] = {file.name: file.stat().st_size for file in write()}
    assert files["host"].keys() == files["gpu"].keys()
    assert files["host"]["trainer.pt"] == pytest.approx(files["gpu"]["trainer.pt"], rel=0.02)


def test_a_step_that_is_not_finite_leaves_what_lies_on_the_host(folder: Path) -> None:
    learner, other = strategy("host", folder), strategy("host", folder)
    train(learner, range(1))
    train(other, range(1))
    learner.forward_backward(batch(3), SFT_LOSS)
    next(master for master in learner._masters.values() if master.grad is not None).grad.fill_(float("nan"))
    with pytest.raises(TrainingDiverged):
        learner.optim_step()
    assert_equal(learner, other)
    assert train(learner, range(1, 2)) == train(other, range(1, 2))


def test_a_parameter_without_a_gradient_is_not_stepped(folder: Path) -> None:
    learners = [strategy(where, folder) for where in KINDS]
    for learner in learners:
        train(learner, range(1))
        learner.forward_backward(batch(9), SFT_LOSS)
        learner._masters["model.norm.weight"].grad = None
        learner.optim_step()
    assert_equal(*learners)


def test_gradients_of_the_model_are_taken_the_moment_they_are_there(folder: Path) -> None:
    learner = strategy("gpu", folder)
    held = []
    for parameter in learner._parameters.values():
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(one.grad is not None for one in learner._parameters.values()))
        )
    learner.forward_backward(batch(0), SFT_LOSS)
    assert len(held) == len(learner._parameters)
    assert max(held) == 0


def test_tensors_share_blocks_that_waste_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BLOCK_VALUES", 1024)
    taken: list[int] = []
    real = memory._block

    def block(at_least: int, *, pinned: bool) -> torch.Tensor:
        made = real(at_least, pinned=pinned)
        taken.append(len(made))
        return made

    monkeypatch.setattr(memory, "_block", block)
    sizes = {number: torch.Size((3, 64)) for number in range(50)} | {100: torch.Size((5, 300)), 101: torch.Size((7,))}
    tensors = host_tensors(sizes, pinned=False)
    assert sum(taken) < 1.15 * sum(size.numel() for size in sizes.values())
    for number, tensor in tensors.items():
        tensor.fill_(number)
    for number, tensor in tensors.items():
        assert tensor.shape == sizes[number]
        assert (tensor == number).all()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_pieces_go_through_in_order_though_slots_are_few() -> None:
    host = torch.arange(40.0)
    seen = []

    def double(there: list[torch.Tensor]) -> None:
        seen.append(float(there[0][0]))
        there[0].mul_(2)

    pieces = [stream.Piece((host[start : start + 7],), double) for start in range(0, 40, 7)]  # type: ignore[arg-type]
    stream.take_through(torch.device("cpu"), pieces)
    assert torch.equal(host, torch.arange(40.0) * 2)
    assert seen == [0.0, 7.0, 14.0, 21.0, 28.0, 35.0]


def test_a_host_without_room_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"no room for .* GiB more of optimizer state"):
        host_tensors({0: torch.Size((2**50,))}, pinned=False)
