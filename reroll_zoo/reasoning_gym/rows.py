"""Tasks of reasoning-gym's generators as rows."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from reroll.errors import DataError
from reroll_zoo.reasoning_gym.config import ReasoningGymSourceConfig


def task_rows(config: ReasoningGymSourceConfig) -> Iterator[dict[str, Any]]:
    """Rows of `prompt` and `answer`, with a `reasoning_gym` column that holds what its verifier needs."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"reasoning-gym {config.name}: needs the reasoning-gym package: {config.pip_line}") from error
    if config.name not in DATASETS:
        close = difflib.get_close_matches(config.name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(sorted(DATASETS))}"
        raise DataError(f"reasoning-gym has no generator {config.name!r} ({hint})")
    try:
        tasks = reasoning_gym.create_dataset(config.name, size=config.size, seed=config.seed, **config.options)
    except (TypeError, ValueError, AssertionError) as error:  # how its generators refuse their options
        raise DataError(f"reasoning-gym {config.name}: options {config.options} are refused: {error}") from error
    for number in range(config.size):
        entry = tasks[number]
        task = {"name": config.name, "options": config.options, "entry": entry}
        yield {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": task}
