"""Tiny random models with a character-level tokenizer: for tests, and for learning a task from scratch in minutes."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from reroll.models.load import save_model

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "smollm3", "mistral", "gemma2"]

PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"

CHARACTERS = "\n" + "".join(c for c in string.printable if c == " " or not c.isspace())
"""Printable ASCII and the newline: text of these comes back exactly."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ROLES = ("system\n", "user\n", "assistant\n")
"""One token each, so that the chat format costs a tiny model five tokens and not thirty."""


def make_tiny(
    folder: Path,
    *,
    family: Family = "llama",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    words: tuple[str, ...] = (),
    characters: str = CHARACTERS,
    max_positions: int = 2048,
    tie_embeddings: bool = True,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a random model and its tokenizer as an ordinary Hugging Face folder, and return the folder.

    `words` become single tokens beside the `characters`; `config` sets further fields of the family's config.
    """
    tokenizer = tiny_tokenizer(characters=characters, words=words, max_positions=max_positions)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "qwen3_moe":
        settings |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = AutoConfig.for_model(family, **settings | config)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)  # type: ignore[no-untyped-call]
    save_model(model, tokenizer, Path(folder))
    return Path(folder)


def tiny_tokenizer(
    *, characters: str = CHARACTERS, words: tuple[str, ...] = (), max_positions: int = 2048
) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters and whole `words`, with ChatML marks and template; ends a turn with <|im_end|>."""
    # A byte-level BPE without merges, because transformers insists on that form for some families (Qwen2).
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [piece for character in characters for piece, _ in byte_level.pre_tokenize_str(character)]
    specials = [PAD, UNKNOWN, START, END]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*specials, *pieces]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in dict.fromkeys((*_ROLES, *words))])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
