"""An episode whose environment was lost with its process is played again: that is no failure of the sample."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from reroll.errors import EnvError, EnvLost
from reroll.types import Prompt, Status, Trajectory

Episode = Callable[[Prompt, str, int], Awaitable[Trajectory]]
"""(prompt, sample id, sample seed) -> how it went. An EnvError fails the sample, an EnvLost has it played again; any other
exception stops the run."""

MAX_REPLAYS = 3
"""How often one sample is played again. An environment that always takes its process down must fail in the end."""


async def replayed(
    episode: Episode, prompt: Prompt, id: str, seed: int, *, on_lost: Callable[[str], None] = lambda reason: None
) -> Trajectory:
    """Run `episode` to its end, with the same seed each time; `on_lost` gets the reason whenever its environment was lost.

    So under the same weights it draws what it would have drawn. Its reason, if it fails, says how often it was lost.
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
