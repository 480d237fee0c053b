"""An environment that takes its process down with it, as it is told. Children import it."""

import os
import signal
from pathlib import Path

from reroll.envs.base import StepResult

NUM_TURNS = 3


class Mortal:
    """Three turns. Its process is killed in the middle of the first episode that finds `fuse`; or, without one, always."""

    def __init__(self, *, fuse: str = "") -> None:
        self._fuse = Path(fuse) if fuse else None
        self._num_turns = 0

    def reset(self, seed: int) -> tuple[dict[str, str], ...]:
        return ({"role": "user", "content": f"seed {seed}"},)

    def step(self, action: str) -> StepResult:
        self._num_turns += 1
        if self._num_turns == 2 and self._is_lit():
            os.kill(os.getpid(), signal.SIGKILL)
        reply = ({"role": "user", "content": f"{self._num_turns}: {action}"},)
        return StepResult(messages=reply, reward=1.0, terminated=self._num_turns == NUM_TURNS)

    def close(self) -> None:
        pass

    def _is_lit(self) -> bool:
        if self._fuse is None:
            return True
        try:
            self._fuse.unlink()
        except FileNotFoundError:
            return False
        return True
