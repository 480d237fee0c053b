"""What every environment's node is. Kinds derive from it and are found by their entry points, group `reroll.envs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from reroll.config.registry import KindConfig


class EnvConfig(KindConfig):
    """The options of an environment. What it `runs` is a class with `reset`, `step` and `close`: `reroll.envs.base.Env`."""

    group: ClassVar[str] = "reroll.envs"

    @property
    def is_remote(self) -> bool:
        """Whether a server plays it, which a run reaches and `reroll check` perhaps not."""
        return False

    def prepare(self) -> None:
        """Import what it needs, ahead of the first episode, and check what can be told without playing.

        Raises what its module raises. A kind that may lack something on this machine, a sandbox say, makes one and closes it.
        """
        self.implementation()

    def rehearsals(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """(path of a field, what to try) for each piece of the user's code that it names.

        It is tried before a run, in a process of its own; what it raises is told with the field.
        """
        yield from ()
