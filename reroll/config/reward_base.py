"""What every reward's node is. Kinds derive from it and are found by their entry points, group `reroll.rewards`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from reroll.config.base import Pattern
from reroll.config.registry import KindConfig
from reroll.errors import Violation


class RewardConfig(KindConfig):
    """How answers are judged. What it `runs` is called with the node and gives what judges (`reroll.rewards.base.Verifier`)."""

    group: ClassVar[str] = "reroll.rewards"
    in_process: ClassVar[bool] = False
    """Whether it may hang, crash or eat memory, and so runs in worker processes; others run where they are called."""
    only_rows_of: ClassVar[str | None] = None
    """The one kind of data source whose rows it can judge; None: any."""

    counts_tokens: ClassVar[bool] = False
    """Whether it judges how many tokens were written."""

    weight: float = 1.0
    """What it counts inside a stack; it changes nothing elsewhere."""

    @property
    def nested(self) -> dict[str, RewardConfig]:
        """The rewards that it is made of, by their path below it."""
        return {}

    @property
    def part_names(self) -> set[str] | None:
        """What the parts of its scores are called; None: only your code knows."""
        return set()

    def violations(self, *, folder: Path) -> Iterator[Violation]:
        """What would stop it later, with paths inside the node. Files that it names may lie in `folder`, the YAML's."""
        yield from ()


class CombinedRewardConfig(RewardConfig):
    """A reward that is made of others. What it `runs` is called with the node and those `nested` in it, in their order, and
    gives something to await: `async (prompt, trajectory) -> Score`."""


class InProcessRewardConfig(RewardConfig):
    """A reward that runs in worker processes, which are killed when a call hangs."""

    in_process: ClassVar[bool] = True

    timeout_s: float = Field(default=10.0, gt=0)
    """A call that takes longer is killed. Your own function then fails the sample; a bundled verifier says that the answer
    is wrong, since an answer that nobody can judge must not be a way out."""
    memory_mb: int | None = Field(default=1024, ge=16)
    """What its process may allocate beyond what importing took; null: no limit. A call that wants more ends
    as one that takes too long."""

    @property
    def score_on_timeout(self) -> float | None:
        """The score of an answer on which judging hangs or dies; None: the sample fails."""
        return None


class AnswerRewardConfig(InProcessRewardConfig):
    """What rewards that compare with a reference answer share. A pattern may take for ever: with one they run in processes."""

    in_process: ClassVar[bool] = False

    pattern: Pattern | None = None
    """A regular expression whose first group (or whole match) is the answer; the last match counts. Default: the whole text."""
    correct: float = 1.0
    """What a right answer earns."""
    wrong: float = 0.0
    """What any other earns."""

    @property
    def score_on_timeout(self) -> float | None:
        return self.wrong
