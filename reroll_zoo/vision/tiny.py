"""Tiny random models that see, with a character-level tokenizer: for tests, and for learning to read a drawing in minutes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

from reroll.models.load import save_model
from reroll_zoo.tiny_models import CHARACTERS, END, tiny_tokenizer

VisionFamily = Literal["smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl", "gemma3"]

_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'PICTURE' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SMOL_WORDS = ("<image>", "<fake_token_around_image>", "<global-img>")
_QWEN_WORDS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_GEMMA_WORDS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
_WINDOW = 24
"""Of every second layer of a tiny Gemma. Wider than a picture, as in the real ones: what happens in others, versions of
transformers see differently."""
_MAX_TILES = 4
"""Rows and columns of a picture that is cut into tiles."""


def make_tiny_vision(
    folder: Path,
    *,
    family: VisionFamily = "smolvlm",
    image_size: int = 32,
    patch_size: int = 4,
    splits: bool = False,
    hidden: int = 64,
    layers: int = 2,
    vision_hidden: int = 64,
    vision_layers: int = 2,
    words: tuple[str, ...] = (),
    characters: str = CHARACTERS,
    max_positions: int = 2048,
    initializer_range: float = 0.02,
    seed: int = 0,
) -> Path:
    """Write a random model that sees, its tokenizer and its image processor as an ordinary Hugging Face folder.

    SmolVLM and Gemma take squares of `image_size`, and with `splits` larger pictures as several of them; Qwen takes any size up
    to about that many pixels squared. Four patches are one token. Weights three times as large (0.06) learn to see much sooner.
    """
    kind = _KINDS[family]
    tiles = tuple(f"<row_{row + 1}_col_{column + 1}>" for row in range(_MAX_TILES) for column in range(_MAX_TILES))
    own_words = (*kind.words, *(tiles if splits and kind.words == _SMOL_WORDS else ()))
    tokenizer = tiny_tokenizer(characters=characters, words=(*own_words, *words), max_positions=max_positions)
    tokenizer.chat_template = _TEMPLATE.replace("PICTURE", kind.shown)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": max_positions,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": initializer_range,
    }
    settings = kind.settings(family, text, tokenizer, image_size, patch_size, vision_hidden, vision_layers)
    settings["vision_config"]["initializer_range"] = settings["initializer_range"] = initializer_range
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, tie_word_embeddings=True, **settings)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        if family == "gemma3":  # Transformers leaves zeros there, and all pictures would look alike.
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=initializer_range)
    save_model(model, tokenizer, Path(folder))
    _processor(family, image_size, patch_size, splits).save_pretrained(folder)
    return Path(folder)


def _smol(
    family: str, text: dict[str, Any], tokenizer: PreTrainedTokenizerFast, size: int, patch: int, hidden: int, layers: int
) -> dict[str, Any]:
    vision = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "image_size": size,
        "patch_size": patch,
    }
    return {
        "text_config": {"model_type": "llama", **text},
        "vision_config": vision,
        "scale_factor": 2,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
    }


def _qwen(
    family: str, text: dict[str, Any], tokenizer: PreTrainedTokenizerFast, size: int, patch: int, hidden: int, layers: int
) -> dict[str, Any]:
    quarter = text["head_dim"] // 8
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2 * quarter, quarter, quarter]}
    vision: dict[str, Any] = {
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_heads": 4,
        "patch_size": patch,
        "out_hidden_size": text["hidden_size"],
    }
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": (size // patch) ** 2, "deepstack_visual_indexes": [0]}
    else:
        # Windows of half the picture, and one layer that sees all of it.
        vision |= {"window_size": size // 2, "fullatt_block_indexes": [layers - 1]}
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    return {"text_config": {**text, "rope_parameters": rope}, "vision_config": vision, **ids}


def _gemma(
    family: str, text: dict[str, Any], tokenizer: PreTrainedTokenizerFast, size: int, patch: int, hidden: int, layers: int
) -> dict[str, Any]:
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "image_size": size,
        "patch_size": patch,
        "vision_use_head": False,
    }
    text |= {"sliding_window": _WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": text["head_dim"]}
    boi, image, eoi = (tokenizer.convert_tokens_to_ids(word) for word in _GEMMA_WORDS)
    ids = {"boi_token_index": boi, "image_token_index": image, "image_token_id": image, "eoi_token_index": eoi}
    return {"text_config": text, "vision_config": vision, "mm_tokens_per_image": (size // patch // 2) ** 2, **ids}


class _Kind(NamedTuple):
    """What families have in common that are alike."""

    words: tuple[str, ...]
    shown: str
    """What the chat template has for a picture."""
    settings: Callable[..., dict[str, Any]]


_SMOL = _Kind(_SMOL_WORDS, "<image>", _smol)
_QWEN = _Kind(_QWEN_WORDS, "<|vision_start|><|image_pad|><|vision_end|>", _qwen)
_KINDS = {
    "smolvlm": _SMOL,
    "idefics3": _SMOL,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "gemma3": _Kind(_GEMMA_WORDS, _GEMMA_WORDS[0], _gemma),
}


def _processor(family: str, size: int, patch: int, splits: bool) -> Any:
    if family == "gemma3":
        crops: dict[str, Any] = {
            "do_pan_and_scan": splits,
            "pan_and_scan_min_crop_size": 8,
            "pan_and_scan_max_num_crops": _MAX_TILES,
            "pan_and_scan_min_ratio_to_activate": 1.5,
        }
        return Gemma3ImageProcessorPil(size={"height": size, "width": size}, **crops)
    if family in ("smolvlm", "idefics3"):
        most = size * _MAX_TILES if splits else size
        return SmolVLMImageProcessorPil(
            size={"longest_edge": most}, max_image_size={"longest_edge": size}, do_image_splitting=splits
        )
    least = 4 * (2 * patch) ** 2  # Four tokens.
    return Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, size={"shortest_edge": least, "longest_edge": max(least, size * size)}
    )
