"""The verifiers of reasoning-gym's tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reroll.config.rewards import ReasoningGymReward
from reroll.errors import RewardError
from reroll.rewards.match import extract
from reroll.types import Prompt, Score, Trajectory

_MENDED: dict[str, Callable[[str, str], bool]] = {
    "game_of_life_halting": lambda given, gold: given == gold,
    "coin_flip": lambda given, gold: bool(given.strip("-+0.")) or not gold.strip("0."),
    "complex_arithmetic": lambda given, gold: "nan" not in given and "inf" not in given,
}
"""What an answer must be before it is scored, for scorers that pay in full for any words, for `0` and for `nan`."""


class ReasoningGym:
    """Asks the generator that the prompt came from."""

    def __init__(self, config: ReasoningGymReward) -> None:
        import reasoning_gym

        self._create = reasoning_gym.create_dataset
        self._config = config
        self._generators: dict[str, Any] = {}

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        if "reasoning_gym" not in prompt.extra:
            raise RewardError(f"prompt {prompt.id} is not a reasoning-gym task: give its domain another reward")
        task = prompt.extra["reasoning_gym"]
        key = repr((task["name"], task["options"]))
        if key not in self._generators:
            self._generators[key] = self._create(task["name"], **task["options"])
        given = extract(trajectory.text, self._config.pattern)
        value = self._score(self._generators[key], task, given)
        return Score(value=value, answer=None if given is None else given.strip())

    def _score(self, generator: Any, task: Mapping[str, Any], given: str | None) -> float:
        is_plausible = _MENDED.get(task["name"])
        if is_plausible and (
            given is None or not is_plausible(given.strip().casefold(), str(task["entry"]["answer"]).casefold())
        ):
            return 0.0
        try:
            return float(generator.score_answer(given, task["entry"]))
        except Exception:  # Some scorers trip over answers they did not expect: those answers are wrong.
            return 0.0
