"""What whole-run tests share: a tiny model, a task of single digits, and a config that trains on it in seconds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # A test that reaches for the hub must fail at once, not wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # Tiny models: threads would only wait for each other.
os.environ.setdefault("TRITON_INTERPRET", "1" if shutil.which("nvidia-smi") is None else "0")  # Kernels run on a CPU, slowly.


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """What a test draws without a seed of its own is the same in every run, so that no failure comes and goes."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reroll.models.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=2, heads=4, kv_heads=2, seed=3)


@pytest.fixture
def rlvr_tree(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    """A whole RLVR config as plain data: repeat a digit. Its rewards lie beside it, as a user's would."""
    (tmp_path / "reroll_test_rewards.py").write_text(USER_REWARDS)
    rows = [{"prompt": f"say {digit}", "answer": str(digit)} for digit in range(10)]
    data = tmp_path / "digits.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(data)}
    return {
        "pipeline": "rlvr",
        "run": {"name": "test", "runs_dir": str(tmp_path / "runs"), "steps": 3, "seed": 1},
        "policy": {"model": str(tiny_model), "devices": "cpu", "optim": {"lr": 1e-2}},
        "engine": {"devices": "cpu"},
        "data": {"train": [source], "eval": [source]},
        "rewards": {"default": {"kind": "import", "path": "reroll_test_rewards:has_digit"}},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 32, "max_tokens": 6},
    }


USER_REWARDS = '''
import os
import time


def has_digit(prompt, trajectory):
    """Mostly nonsense can earn something, so that an untrained model has a signal."""
    return sum(character.isdigit() for character in trajectory.text) / 6


def raises_on_even(prompt, trajectory):
    if int(prompt.answer) % 2 == 0:
        raise ValueError("I do not like even numbers")
    return has_digit(prompt, trajectory)


def always_raises(prompt, trajectory):
    raise KeyError("no such thing")


def hangs_on_seven(prompt, trajectory):
    if prompt.answer == "7":
        time.sleep(60)
    return has_digit(prompt, trajectory)


def nan_on_three(prompt, trajectory):
    return float("nan") if prompt.answer == "3" else has_digit(prompt, trajectory)
'''
