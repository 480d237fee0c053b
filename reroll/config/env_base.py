"""What every environment's node is. Kinds derive from it and are found by their entry points, group `reroll.envs`."""

from __future__ import annotations

from typing import ClassVar

from reroll.config.registry import KindConfig


class EnvConfig(KindConfig):
    """The options of an environment. What it `runs` is a class with `reset`, `step` and `close`: `reroll.envs.base.Env`."""

    group: ClassVar[str] = "reroll.envs"

    def prepare(self) -> None:
        """Import what it needs, ahead of the first episode, and check what can be told without playing.

        Raises what its module raises. A kind that may lack something on this machine, a sandbox say, makes one and closes it.
        """
        self.implementation()
