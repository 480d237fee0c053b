"""What nodes of strategies derive from whose ranks form a process group."""

from __future__ import annotations

from typing import ClassVar

from reroll.config.strategy import RanksStrategyConfig


class GroupStrategyConfig(RanksStrategyConfig):
    """A strategy whose ranks have met in a process group before it is made, each in its own process."""

    runs: ClassVar[str] = "reroll_zoo.ranks.make:make_in_group"
    makes: ClassVar[str]
    """`module:name` of what makes the strategy of one rank; all ranks call it at once. It is called with a function that makes
    the model empty, one that reads it (`as_stored`: in the precision that it is stored in; on the first rank only, others get
    None), the tokenizer, the node, the optimizer's settings, and `device` and `total_steps` by name."""
