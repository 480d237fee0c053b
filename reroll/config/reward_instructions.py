"""How following instructions is judged."""

from __future__ import annotations

from typing import Literal

from reroll.config.reward_base import Judged


class InstructionsReward(Judged):
    """Whether an answer keeps to verifiable instructions, as IFEval states them (columns instruction_id_list and kwargs)."""

    kind: Literal["instructions"]
    mode: Literal["strict", "loose"] = "strict"
    """loose: an instruction also counts as followed if it is without the first line, the last line or asterisks."""
    credit: Literal["all", "fraction"] = "all"
    """all: 1 if every instruction is followed, else 0. fraction: the share of them that is."""
