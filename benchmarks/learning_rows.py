"""The rows of the learning matrix: every preset, with what it needs beside the settings that all rows share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reroll.config.presets import presets

WARM, TEACHER = Path("warm"), Path("teacher")
"""Checkpoints in the working directory of a seed: where every row starts, and what on-policy distillation learns from."""
WARM_PASS_RATE, TEACHER_PASS_RATE = 0.35, 0.9

NUM_STEPS = 50
SHARED_SETTINGS = ("eval.every=0", f"policy.model={WARM}")
"""On top of examples/quickstart/grpo.yaml, in every row."""


@dataclass(frozen=True, slots=True)
class Row:
    """A preset as it is trained. Settings are overrides as on the command line."""

    preset: str
    settings: tuple[str, ...] = ()
    reason: str = ""
    """Why the settings, where the number of mini-batches is not all there is to them."""


def _mini_batches(preset: str) -> tuple[str, ...]:
    """With one optimizer step a batch every ratio is 1 and such a loss is REINFORCE: with four it does its work."""
    return () if presets()[preset]["loss"]["kind"] == "reinforce" else ("train.mini_batches=4",)


def _row(preset: str, *settings: str, reason: str = "") -> Row:
    return Row(preset, (*_mini_batches(preset), *settings), reason)


_CRITIC = ("critic.devices=cpu", "critic.optim={lr: 1.0e-3, warmup_steps: 20}", "critic.warmup_steps=5")
_STALE = "samples one version old, so that there is something to correct"

_SPECIAL: dict[str, Row] = {
    "ppo": _row("ppo", *_CRITIC, reason="the critic has an optimizer of its own, and a few steps' start"),
    "gdpo": _row(
        "gdpo",
        "rewards.default={kind: import, path: sorting_reward:digits_and_exactness}",
        reason="a reward of two parts: the share of digits in place, and exactness",
    ),
    "opd": _row(
        "opd",
        f"teachers.sft={{model: {TEACHER}, devices: cpu}}",
        reason=f"the teacher is the same model after more SFT, right on {TEACHER_PASS_RATE:.0%} and more",
    ),
    "gkd": _row(
        "gkd",
        f"teachers.sft={{model: {TEACHER}, devices: cpu}}",
        reason="the same teacher, by its whole distribution",
    ),
    "remax": _row(
        "remax",
        "rollout.temperature=0.4",
        reason="at temperature 1 samples are right 3 % of the time and the greedy answer 45 %: nearly every advantage is "
        "negative, and all seeds fall or stand still (to 0.36, 0.02, 0.20); near the greedy answer it learns",
    ),
    "sapo": _row(
        "sapo",
        "policy.optim.lr=2.0e-4",
        reason="its gate fades where a clip would stop: at the others' learning rate seed 1 fell to 0",
    ),
    "decoupled_ppo": _row("decoupled_ppo", "rollout.max_staleness=1", reason=_STALE),
    "tis": _row("tis", "rollout.max_staleness=1", reason=_STALE),
    "icepop": _row("icepop", "rollout.max_staleness=1", reason=_STALE),
}
"""Presets that cannot run, or cannot show their point, without more."""

_VARIANTS: dict[str, Row] = {
    "ppo (shared trunk)": _row("ppo", "critic={kind: shared}", reason="the critic is a second head on the policy"),
    "grpo (LoRA)": _row(
        "grpo",
        "policy.lora={rank: 16, alpha: 32}",
        "policy.optim.lr=1.0e-3",
        reason="adapters start from zero and want a higher learning rate; at ten times the others', two seeds fell to 0",
    ),
}

ROWS: dict[str, Row] = {preset: _SPECIAL.get(preset, _row(preset)) for preset in presets()} | _VARIANTS
"""By the name in the table."""
