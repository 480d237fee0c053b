"""What judges promise beyond their field types: a template, a key and a package that are there, votes that can differ."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from reroll.config.reward_judge import EndpointJudge, JudgeReward, check_template
from reroll.errors import Violation


def judge_violations(where: str, config: JudgeReward, *, folder: Path) -> Iterator[Violation]:
    """Everything that would stop this judge later. Its template may lie in `folder` or in the working directory."""
    if config.votes > 1 and config.temperature == 0:
        problem = f"{config.votes} votes of a greedy judge are all the same"
        yield Violation(f"{where}.votes", problem, "set temperature above 0, or votes to 1")
    if config.template is not None and config.template_file is not None:
        yield Violation(f"{where}.template_file", "is set beside template", "keep one of them")
    try:
        template_of(config, folder=folder)
    except (OSError, ValueError) as error:
        fix = "give a text file beside the YAML or in the working directory"
        yield Violation(f"{where}.template_file", f"{config.template_file} cannot be used: {error}", fix)
    if isinstance(config.model, EndpointJudge):
        variable = config.model.api_key_env
        if variable and not os.environ.get(variable):
            problem = f"the environment variable {variable} is not set"
            yield Violation(
                f"{where}.model.api_key_env", problem, f"export {variable}=…, or leave it out for a server without keys"
            )
        if importlib.util.find_spec("aiohttp") is None:
            yield Violation(f"{where}.model.kind", "needs the package aiohttp", "pip install 'reroll[agents]'")


def template_of(config: JudgeReward, *, folder: Path) -> str | None:
    """The judge's template, None for the built-in one. Raises OSError or ValueError for a file that cannot be one."""
    if config.template_file is None:
        return config.template
    beside = folder / config.template_file
    return check_template((beside if beside.is_file() else config.template_file).read_text(encoding="utf-8"))
