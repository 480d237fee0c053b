"""What nodes of strategies derive from whose ranks form a process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from reroll.config.strategy import RanksStrategyConfig
from reroll.errors import Violation
from reroll_zoo.vision.kinds import seeing_family


class GroupStrategyConfig(RanksStrategyConfig):
    """A strategy whose ranks have met in a process group before it is made, each in its own process."""

    runs: ClassVar[str] = "reroll_zoo.ranks.make:make_in_group"
    makes: ClassVar[str]
    """`module:name` of what makes the strategy of one rank; all ranks call it at once. It is called with a function that makes
    the model empty, one that reads it (`as_stored`: in the precision that it is stored in; on the first rank only, others get
    None), the tokenizer, the node, the optimizer's settings, and `device` and `total_steps` by name."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_optimizer(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "optimizer" in given:
            raise ValueError("optimizer is an option of torch; what keeps that of ranks on the host is cpu_offload: true")
        return given

    @property
    def shows_pictures(self) -> bool:
        """Whether its ranks, laid out like this, are shown pictures."""
        return False

    def violations(self, where: str, model: Any, *, num_ranks: int | None) -> Iterator[Violation]:
        if family := seeing_family(model.model):
            yield from self.sight_violations(where, model, family=family)

    def sight_violations(self, where: str, model: Any, *, family: str) -> Iterator[Violation]:
        """What keeps ranks from a model of this family, which sees."""
        if not self.shows_pictures:
            yield Violation(
                f"{where}.strategy.kind",
                f"is {self.kind}, whose ranks are shown no pictures, and models of family {family} see",
                "set it to torch",
            )
        elif getattr(model, "train_vision", False):  # One that only answers has no such field.
            yield Violation(
                f"{where}.train_vision",
                f"is true, and ranks of {self.kind} do not train what a model sees with",
                f"set it to false, or {where}.strategy.kind to torch",
            )
