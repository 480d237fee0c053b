"""Stop strings, looked for in the text as it is written."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BYTES_PER_CHARACTER = 4
"""A token may be one byte of a character: that many tokens per character are enough to hold a stop string."""

_MARGIN_TOKENS = 4


def completes_stop(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether the last token completes one of the strings."""
    if not stops:
        return False
    window = token_ids[-(_BYTES_PER_CHARACTER * max(map(len, stops)) + _MARGIN_TOKENS) :]
    text = _decode(tokenizer, window)
    found = [stop for stop in stops if stop in text]
    if not found:
        return False
    before = _decode(tokenizer, window[:-1])
    return any(text.count(stop) > before.count(stop) for stop in found)


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
