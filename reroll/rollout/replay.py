"""Plays an episode again if its environment was lost with its process: that is no failure of the sample."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from reroll.errors import EnvError, EnvLost
from reroll.types import Prompt, Status, Trajectory

Episode = Callable[[Prompt, str, int], Awaitable[Trajectory]]
"""(prompt, sample id, sample seed) -> its trajectory. An EnvError fails the sample; after an EnvLost it is played again; any
other exception stops the run."""

MAX_REPLAYS = 3
"""Limit per sample: an environment that always kills its process must fail in the end."""


async def replayed(
    episode: Episode, prompt: Prompt, id: str, seed: int, *, on_lost: Callable[[str], None] = lambda reason: None
) -> Trajectory:
    """Run `episode`, again with the same seed if its environment is lost; `on_lost` gets the reason each time.

    Under the same weights it draws the same tokens again. The reason of a sample that fails says how often it was lost.
    """
    num_lost = 0
    while True:
        try:
            return await episode(prompt, id, seed)
        except EnvLost as error:
            if num_lost == MAX_REPLAYS:
                return _failed(id, f"{error}, each of the {num_lost + 1} times it was played")
            num_lost += 1
            on_lost(str(error))
        except EnvError as error:
            return _failed(id, str(error))


def _failed(id: str, reason: str) -> Trajectory:
    return Trajectory(id=id, turns=(), status=Status.FAILED, reason=reason)
