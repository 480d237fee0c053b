"""The memory model against hand arithmetic, and against the tensors of a real strategy and engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reroll.config.parts import LoraConfig, OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.infer.embedded.attention import SlotCache
from reroll.models.attention import PackedAttention, hidden_states
from reroll.models.load import load_model, load_tokenizer
from reroll.training.torch_strategy import TorchStrategy
from reroll_zoo.plan.memory import (
    GIB,
    Training,
    activation_bytes,
    answer_memory,
    engine_memory,
    host_memory,
    kv_cache_bytes,
    layer_activation_bytes,
    logprob_bytes,
    pooled_engine_memory,
    train_memory,
)
from reroll_zoo.plan.shape import shape_of
from reroll_zoo.tiny_models import Family, make_tiny

P = 8_190_735_360
"""Parameters of Qwen3-8B."""
HEAD = 151_936 * 4096


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_a_whole_model_in_bf16_holds_masters_and_moments_and_sums_gradients_in_fp32() -> None:
    memory = train_memory(shape_of("Qwen/Qwen3-8B"), Training(value_bytes=2, micro_batch_tokens=4096))
    assert memory.held == {"parameters": 2 * P, "fp32 masters": 4 * P, "optimizer": 8 * P}
    assert memory.working["gradients"] == 4 * P


def test_an_optimizer_on_the_host_leaves_the_device_weights_sums_and_three_pieces() -> None:
    shape, how = shape_of("Qwen/Qwen3-8B"), Training(value_bytes=2, micro_batch_tokens=4096, host_optimizer=True)
    memory = train_memory(shape, how)
    assert memory.held == {"parameters": 2 * P}
    assert memory.working["gradients"] == 4 * P
    assert "optimizer's pieces" not in memory.working, "they fit into what the micro-batches have left"
    critic = train_memory(shape, replace(how, micro_batch_tokens=64, has_language_head=False)).working
    assert critic["optimizer's pieces"] == 3 * 3 * 4 * 2**25 - critic["activations"]
    assert host_memory(shape, how) == {"fp32 masters": 4 * P, "optimizer": 8 * P}
    assert host_memory(shape, replace(how, value_bytes=4)) == {"optimizer": 8 * P}
    assert host_memory(shape, replace(how, host_optimizer=False)) == {}


def test_in_fp32_the_parameters_are_their_own_masters() -> None:
    memory = train_memory(shape_of("Qwen/Qwen3-8B"), Training(value_bytes=4, micro_batch_tokens=4096))
    assert memory.held == {"parameters": 4 * P, "optimizer": 8 * P}
    assert memory.working["gradients"] == 4 * P


def test_shards_hold_their_part_and_gather_two_layers_and_both_ends() -> None:
    shape = shape_of("Qwen/Qwen3-8B")
    memory = train_memory(shape, Training(value_bytes=2, micro_batch_tokens=4096, shards=8))
    assert memory.held == {"parameters": 4 * P // 8, "optimizer": 8 * P // 8}
    # q and o: 4096 x 4096, k and v: 4096 x 1024, three of 4096 x 12288, two norms of 4096 and two of 128.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert memory.working["gathered layers"] == 2 * 2 * layer + 2 * 2 * HEAD
    assert memory.working["gradients"] == 4 * P // 8 + 2 * layer
    cut_further = train_memory(shape, Training(value_bytes=2, micro_batch_tokens=4096, shards=4, tp=2))
    assert cut_further.held == memory.held
    assert cut_further.working["gathered layers"] == memory.working["gathered layers"] // 2
    at_home = train_memory(shape, Training(value_bytes=2, micro_batch_tokens=4096, shards=8, offload=True))
    assert at_home.held == {}


def test_the_logprob_term_is_one_chunk_of_logits_and_the_heads_gradient() -> None:
    shape = shape_of("Qwen/Qwen3-8B")
    how = Training(value_bytes=2, micro_batch_tokens=8192, logprob_chunk=1024)
    # A chunk is written over by its gradient (2); the head's gradient is held as a part (2) and as a sum (4).
    assert logprob_bytes(shape, how) == 1024 * 151_936 * 2 + HEAD * 6
    adapter = Training(value_bytes=2, micro_batch_tokens=8192, logprob_chunk=1024, lora_parameters=1)
    assert logprob_bytes(shape, adapter) == 1024 * 151_936 * 2


def test_a_fixed_model_holds_its_parameters_alone() -> None:
    memory = answer_memory(shape_of("Qwen/Qwen3-8B"), Training(value_bytes=2, micro_batch_tokens=4096))
    assert memory.held == {"parameters": 2 * P}
    assert "gradients" not in memory.working


def test_the_cache_of_an_engine_is_layers_times_heads_times_tokens_in_whole_pages() -> None:
    per_token = 36 * 2 * 8 * 128 * 2  # layers, keys and values, heads, head size, bf16
    assert shape_of("Qwen/Qwen3-8B").kv_bytes_per_token(2) == per_token
    assert kv_cache_bytes(10, 1000, per_token, on_cpu=True) == 10 * 1000 * per_token
    # 64 sequences of 2550 tokens are 64 x 40 pages of 64; fewer than 256 pages are never taken.
    assert kv_cache_bytes(64, 2550, per_token, on_cpu=False) == 2560 * 64 * per_token
    assert kv_cache_bytes(1, 100, per_token, on_cpu=False) == 256 * 64 * per_token


def test_an_engine_that_adopts_the_trainers_weights_has_none_of_its_own() -> None:
    shape = shape_of("Qwen/Qwen3-8B")
    own = engine_memory(shape, value_bytes=2, max_running=8, longest=512, num_requests=64)
    assert own.held == {"weights": 2 * P}
    assert engine_memory(shape, value_bytes=2, max_running=8, longest=512, num_requests=64, shares_weights=True).held == {}


def test_vllm_fills_its_pool_with_weights_and_cache() -> None:
    memory = pooled_engine_memory(shape_of("Qwen/Qwen3-8B"), value_bytes=2, tp=2, pool_bytes=40 * GIB, longest=4096)
    assert memory.held == {"weights": P}
    assert sum(memory.held.values()) + sum(memory.working.values()) == 40 * GIB


# Against real tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=2, heads=4, kv_heads=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_the_terms_are_the_bytes_of_a_strategys_tensors(model: Path, precision: str, lora: LoraConfig | None) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    network = load_model(str(model), dtype=dtype, device="cpu", lora=lora)
    config = TorchStrategyConfig(precision=precision)  # type: ignore[arg-type]
    strategy = TorchStrategy(network, load_tokenizer(str(model)), config, OptimConfig(), total_steps=1)
    for master in strategy._masters.values():
        master.grad = torch.zeros_like(master)
    strategy._optimizer.step()

    shape = shape_of(str(model))
    size = dtype.itemsize
    how = Training(
        value_bytes=size,
        micro_batch_tokens=64,
        lora_parameters=shape.lora_parameters(lora.rank, lora.targets) if lora else 0,
        on_cpu=True,
    )
    memory = train_memory(shape, how)
    copies = [master for name, master in strategy._masters.items() if master is not strategy._parameters[name]]
    assert memory.held["parameters"] + memory.held.get("fp32 masters", 0) == num_bytes(network.parameters()) + num_bytes(copies)
    moments = [value for state in strategy._optimizer.state.values() for key, value in state.items() if key != "step"]
    assert memory.held["optimizer"] == num_bytes(moments)
    sums = num_bytes(master.grad for master in strategy._masters.values() if master.grad is not None)
    assert memory.working["gradients"] == sums


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_activations_are_what_autograd_saves(family: Family, dtype: torch.dtype, checkpointing: bool, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", family=family, hidden=96, layers=4, heads=6, kv_heads=2)
    network = load_model(str(folder), dtype=dtype, device="cpu")
    if checkpointing:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        network.train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    saved: dict[int, tuple[Tensor, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = (tensor, storage.nbytes())  # The tensor too, or its address would be used again.
        return tensor

    num_tokens, bounds = 256, torch.tensor([0, 128, 256])
    positions = torch.arange(128).repeat(2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states(network, torch.zeros(num_tokens, dtype=torch.int64), positions, PackedAttention(bounds))
    measured = sum(size for _, size in saved.values())

    shape = shape_of(str(folder))
    how = Training(value_bytes=dtype.itemsize, micro_batch_tokens=num_tokens, checkpointing=checkpointing, on_cpu=True)
    predicted = activation_bytes(shape, how) - num_tokens * 2 * dtype.itemsize * shape.hidden  # The rows for the head.
    if checkpointing:  # Autograd has saved the layers' inputs; the layers at work are made again one by one, later.
        predicted -= num_tokens * layer_activation_bytes(shape, how)
    assert predicted == pytest.approx(measured, rel=0.03)


def test_the_cache_term_is_the_slot_caches_own_size(model: Path) -> None:
    shape = shape_of(str(model))
    cache = SlotCache(
        num_layers=shape.num_layers,
        num_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.reserve(num_slots=6, length=128)
    assert kv_cache_bytes(6, 128, shape.kv_bytes_per_token(4), on_cpu=True) == cache.num_bytes
