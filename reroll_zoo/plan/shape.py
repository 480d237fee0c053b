"""The sizes of a decoder, counted from its config.json. No weight is loaded, no package imported."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from reroll.config.host import adapter_base, model_folder
from reroll.errors import ModelError
from reroll_zoo.plan.known import KNOWN

_TIED = {"gemma", "gemma2", "gemma3_text"}
"""Families that use their embedding as head unless they say otherwise."""
_QKV_BIAS = {"qwen2"}
"""Families with a bias on queries, keys and values, which their config.json does not mention."""
_QK_NORM = {"qwen3", "qwen3_moe", "gemma3_text"}
"""Families that normalise queries and keys by head."""
_FOUR_NORMS = {"gemma2", "gemma3_text"}
"""Families that also normalise what attention and MLP put out."""
COUNTED = {"llama", "mistral", "smollm3", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"}
"""Families whose parameters are counted exactly; others are taken for a Llama of their sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a decoder's memory and work follow from."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_positions: int
    is_tied: bool
    """The head is the embedding."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    num_sparse_layers: int = 0
    """Layers whose MLP is a mixture of experts."""

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of all heads; the values have the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised by head."""
        return self.family in _QK_NORM

    @property
    def attention_parameters(self) -> int:
        """Attention parameters of one layer."""
        weights = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        biases = (self.query_width + 2 * self.kv_width) * self.qkv_bias + self.hidden * self.o_bias
        return weights + biases + 2 * self.head_dim * self.has_qk_norm

    @property
    def dense_mlp_parameters(self) -> int:
        """MLP parameters of one layer without experts."""
        return 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden) * self.mlp_bias

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def all_expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.num_sparse_layers * self.num_experts * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the LM head, tied to the embedding or not."""
        return self.vocabulary * self.hidden

    @property
    def norm_parameters(self) -> int:
        """Norm parameters of one layer."""
        return self.hidden * (4 if self.family in _FOUR_NORMS else 2)

    @property
    def num_parameters(self) -> int:
        """All of them, as a checkpoint holds them."""
        embeddings = self.head_parameters * (1 if self.is_tied else 2)
        return self.num_layers * (self.attention_parameters + self.norm_parameters) + self._mlps() + embeddings + self.hidden

    @property
    def num_active_parameters(self) -> int:
        """Those that a token is multiplied with: without the embedding, with the head, of experts only the chosen."""
        return self.body_parameters + self.head_parameters

    @property
    def body_parameters(self) -> int:
        """Those that a token is multiplied with below the head."""
        attention = self.num_layers * (self.attention_parameters + self.norm_parameters)
        return attention + self._mlps(num_experts=self.experts_per_token)

    @property
    def linear_parameters(self) -> int:
        """The weights of the linear layers below the head, without experts and their routers."""
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        num_dense = self.num_layers - self.num_sparse_layers
        return self.num_layers * attention + num_dense * 3 * self.hidden * self.intermediate

    def met_parameters(self, *, ep: int) -> int:
        """Those that one of the ranks meets which share out the experts of every layer: all but the others' experts."""
        return self.num_parameters - self.all_expert_parameters * (ep - 1) // ep

    def largest_layer_parameters(self, *, ep: int = 1) -> int:
        """Those of them in the largest layer."""
        experts = self.hidden * self.num_experts + self.num_experts // ep * self.expert_parameters
        dense = self.dense_mlp_parameters if self.num_sparse_layers < self.num_layers else 0
        return self.attention_parameters + self.norm_parameters + max(dense, experts if self.num_sparse_layers else 0)

    @property
    def mlp_width(self) -> int:
        """Values that a token has in the widest place of a layer's MLP."""
        sparse = self.experts_per_token * self.expert_intermediate if self.num_sparse_layers else 0
        return max(self.intermediate if self.num_sparse_layers < self.num_layers else 0, sparse)

    def kv_bytes_per_token(self, value_bytes: int) -> int:
        """Keys and values of one token in all layers."""
        return self.num_layers * 2 * self.kv_width * value_bytes

    def expected_read_parameters(self, num_tokens: float) -> float:
        """Parameters read to advance so many tokens at once: of the experts, those that some token is likely to choose."""
        if not self.num_experts:
            return float(self.num_active_parameters)
        share = 1.0 - math.pow(1 - self.experts_per_token / self.num_experts, max(num_tokens, 1.0))
        chosen = self.num_sparse_layers * self.experts_per_token * self.expert_parameters
        return self.num_active_parameters - chosen + self.all_expert_parameters * share

    def lora_parameters(self, rank: int, targets: list[str] | str) -> int:
        """Parameters of an adapter of this rank on the linear layers named, which are all of them by default. Of a model
        with experts, only attention is adapted."""
        attention = {
            "q_proj": self.hidden + self.query_width,
            "k_proj": self.hidden + self.kv_width,
            "v_proj": self.hidden + self.kv_width,
            "o_proj": self.query_width + self.hidden,
        }
        wanted = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        chosen = [name for name in wanted if targets == "all-linear" or name in targets]
        num_mlp = len([name for name in chosen if name not in attention])
        mlps = 0 if self.num_sparse_layers else self.num_layers * (self.hidden + self.intermediate)
        return rank * (self.num_layers * sum(attention.get(name, 0) for name in chosen) + num_mlp * mlps)

    def _mlps(self, num_experts: int | None = None) -> int:
        """Of all layers, with all experts or with so many in each."""
        num_experts = self.num_experts if num_experts is None else num_experts
        sparse = self.hidden * self.num_experts + num_experts * self.expert_parameters
        return (self.num_layers - self.num_sparse_layers) * self.dense_mlp_parameters + self.num_sparse_layers * sparse


@lru_cache(maxsize=64)
def shape_of(model: str) -> ModelShape:
    """The sizes of a model: of its folder, of a fetched model, of the hub's cache on this disk, or of one known by name.

    Raises ModelError if there is no config.json to read.
    """
    return parse_shape(_config_of(model), model)


def parse_shape(config: Mapping[str, Any], model: str = "the model") -> ModelShape:
    """The sizes that a config.json states."""
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    family = str(config.get("model_type", "llama"))
    family = "gemma3_text" if family == "gemma3" else family
    try:
        heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        hidden = int(config["hidden_size"])
        has_bias = bool(config.get("attention_bias"))
        return ModelShape(
            family=family,
            num_layers=layers,
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            max_positions=int(config.get("max_position_embeddings") or 1 << 20),
            is_tied=bool(config.get("tie_word_embeddings", family in _TIED)),
            qkv_bias=has_bias or family in _QKV_BIAS,
            o_bias=has_bias,
            mlp_bias=bool(config.get("mlp_bias")),
            num_experts=_num_experts(config),
            experts_per_token=int(config.get("num_experts_per_tok") or 0) if _num_experts(config) else 0,
            expert_intermediate=int(config.get("moe_intermediate_size") or 0),
            num_sparse_layers=_num_sparse(config, layers),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the config.json of {model} does not give the sizes of a decoder ({error!r}): a plan needs hidden_size, "
            "num_hidden_layers, num_attention_heads, intermediate_size and vocab_size"
        ) from error


def _num_experts(config: Mapping[str, Any]) -> int:
    """The hub's files have one name for it, those that transformers writes today another."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _num_sparse(config: Mapping[str, Any], num_layers: int) -> int:
    if not _num_experts(config):
        return 0
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    return len([layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0])


def _config_of(model: str) -> Mapping[str, Any]:
    if folder := model_folder(model) or _cached(model):
        if base := adapter_base(folder):
            return _config_of(base)
        try:
            return dict(json.loads((folder / "config.json").read_text()))
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if model in KNOWN:
        return KNOWN[model]
    raise ModelError(
        f"the sizes of {model!r} are not known here: give a folder that holds its config.json (the weights are not needed)"
    )


def _cached(model: str) -> Path | None:
    """Where the hub's client stores a model's files; None if it has none."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
    snapshots = sorted((home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))
    return next((path for folder in snapshots if (path := model_folder(str(folder)))), None)
