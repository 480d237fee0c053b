"""The reward for following instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from pydantic import ValidationError, validate_call

from reroll.errors import RewardError
from reroll.types import Prompt, Score, Trajectory
from reroll_zoo.ifeval.config import InstructionsConfig
from reroll_zoo.ifeval.instructions import INSTRUCTIONS

_VALIDATED = {name: validate_call(kind.check) for name, kind in INSTRUCTIONS.items()}
"""The checks, each refusing arguments that are missing, unknown or of the wrong type."""

Instruction = tuple[str, dict[str, Any]]
"""An id of `INSTRUCTIONS` and the arguments of its check."""


class Instructions:
    """Whether an answer follows the instructions of its row, all of them or by share (`credit`).

    The row's columns are IFEval's: `instruction_id_list`, and `kwargs` with one object for each id, in which nulls mean
    nothing. Told beside the score are `followed`, the share of instructions followed, and the same for each group of ids,
    such as `keywords`. An empty answer follows nothing: what forbids commas or words is a rule for an answer, and there is
    none.
    """

    def __init__(self, config: InstructionsConfig) -> None:
        self._config = config

    def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        texts = variants(trajectory.text) if self._config.mode == "loose" else [trajectory.text]
        by_group: defaultdict[str, list[bool]] = defaultdict(list)
        for name, kwargs in instructions_of(prompt):
            by_group[name.partition(":")[0]].append(_is_followed(name, kwargs, texts, prompt=prompt))
        verdicts = [verdict for group in by_group.values() for verdict in group]
        value = fmean(verdicts) if self._config.credit == "fraction" else float(all(verdicts))
        info = {"followed": fmean(verdicts), **{group: fmean(members) for group, members in by_group.items()}}
        return Score(value=value, info=info)


def instructions_of(prompt: Prompt) -> list[Instruction]:
    """The instructions of a prompt's row. Raises RewardError if there are none, or one that is not known."""
    names, kwargs = prompt.extra.get("instruction_id_list"), prompt.extra.get("kwargs")
    if not isinstance(names, list) or not isinstance(kwargs, list) or not len(names) == len(kwargs) > 0:
        raise RewardError(
            f"prompt {prompt.id} holds no instructions: its row needs the columns instruction_id_list (a list of ids) and"
            " kwargs (a list with an object for each id)"
        )
    unknown = [name for name in names if name not in INSTRUCTIONS]
    if unknown:
        raise RewardError(f"prompt {prompt.id} has the unknown instruction {unknown[0]!r}: known are {', '.join(INSTRUCTIONS)}")
    return [(name, _without_nulls(given)) for name, given in zip(names, kwargs, strict=True)]


def _without_nulls(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Columnar files give every instruction the arguments of all, most of them null."""
    return {name: value for name, value in (kwargs or {}).items() if value is not None}


def variants(text: str) -> list[str]:
    """The text and what is left of it without the first line, the last line or both, each also without asterisks.

    Models open with "Sure, here it is:" and close with an offer to help; neither breaks an instruction in spirit.
    """
    lines = text.split("\n")
    shortened = ["\n".join(kept).strip() for kept in (lines[1:], lines[:-1], lines[1:-1])]
    return [variant for kept in (text, *shortened) for variant in (kept, kept.replace("*", ""))]


def _is_followed(name: str, kwargs: dict[str, Any], texts: Iterable[str], *, prompt: Prompt) -> bool:
    check = _VALIDATED[name]
    try:
        return any(check(text, **kwargs) for text in texts if text.strip())
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        raise RewardError(f"prompt {prompt.id} has bad arguments for {name}: {problems}") from None
