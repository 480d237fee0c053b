"""What every source of prompts is. Kinds derive from it and are found by their entry points, group `reroll.data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from reroll.config.registry import KindConfig
from reroll.errors import Violation


class SourceConfig(KindConfig):
    """A source of prompts."""

    group: ClassVar[str] = "reroll.data"

    domain: str = "default"
    """Chooses the reward of its prompts."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of this source in the mix, relative to the others. A domain's share is that of its sources together, and holds
    for what is trained on: a group that is dropped is replaced by one of its domain."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows."""
    system: str | None = None
    """A system message put before every prompt that brings none of its own."""
    level: int = 0
    """How hard its prompts are, by your own count: curriculum `ladder` opens one level of a domain after the other."""

    def violations(self) -> Iterator[Violation]:
        """What would keep it from being read, as far as names of files tell; paths are below the node."""
        yield from ()


class RowSourceConfig(SourceConfig):
    """A source of rows with named columns. What it `runs` is called with the node and gives them, as mappings, one by one.

    A row has `messages` (chat messages) or `prompt` (one user message), `answer` where a reward compares with one, `system`
    where it brings its own system message; rewards see all other columns as the prompt's `extra`.
    """

    group: ClassVar[str] = "reroll.data"

    @property
    def title(self) -> str:
        """How messages call it."""
        return self.kind


class NamedColumnsConfig(RowSourceConfig):
    """Rows whose columns may have other names."""

    prompt_key: str = "prompt"
    """The column with the prompt, as text: one user message."""
    messages_key: str = "messages"
    """The column with chat messages, which goes before `prompt_key`."""
    answer_key: str = "answer"
    """Reference answer; for sft rows without an assistant message, the completion to learn; for kto, the answer judged."""
    answer_after: str | None = Field(default=None, min_length=1)
    """The answer is what stands after the last of these marks in its column: `"####"` for GSM8K."""
    chosen_key: str = "chosen"
    """The better answer of a pair: text, or chat messages that continue the prompt."""
    rejected_key: str = "rejected"
    """The worse one."""
    margin_key: str = "margin"
    """By how much the better answer should win, where the row says so; for reward models."""
    label_key: str = "label"
    """Whether an answer is good: true or false, 1 or 0; for kto."""
