"""What whole-run tests share: a tiny model, a task of single digits, and a config that trains on it in seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # A test that reaches for the hub must fail at once, not wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # Tiny models: threads would only wait for each other.
os.environ.setdefault("TRITON_INTERPRET", "1" if shutil.which("nvidia-smi") is None else "0")  # Kernels run on a CPU, slowly.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # As whoever starts the tests in the background of a script has it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("reroll", deadline=None)  # A busy machine is no failure: no property is about the clock.
settings.load_profile("reroll")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """What a test draws without a seed of its own is the same in every run, so that no failure comes and goes."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reroll_zoo.tiny_models import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=2, heads=4, kv_heads=2, seed=3)


@pytest.fixture(scope="session")
def unaudited() -> set[Path]:
    """Folders of runs whose journals a test has damaged on purpose."""
    return set()


@pytest.fixture(scope="session", autouse=True)
def _every_run_stands_the_audit(tmp_path_factory: pytest.TempPathFactory, unaudited: set[Path]) -> Iterator[None]:
    """Whatever the tests did to their runs, in this process or another: nothing is lost, nothing trained twice, and their
    metrics say of their samples what their journals say."""
    yield
    faults = []
    for place, folders, files in os.walk(tmp_path_factory.getbasetemp()):
        # What a test has made up has no checkpoints.
        is_run = "config.yaml" in files and {"checkpoints", "journal"} <= {*folders}
        folders[:] = [name for name in folders if name not in ("checkpoints", "models")]
        if not is_run or Path(place) in unaudited:
            continue
        from reroll.observe.run_folder import RunFolder
        from reroll_zoo.audit.run_audit import audit_run

        try:
            faults += [f"{place}: {violation}" for violation in audit_run(RunFolder(Path(place))).violations]
        except Exception as error:
            faults.append(f"{place}: {error!r}")
    if faults:
        pytest.fail("\n".join(["runs of these tests do not stand the audit:", *faults]), pytrace=False)


CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def reroll(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """`reroll WORDS…` as a user types it in the folder `cwd`, but in this process: a new one would load torch again."""
    from reroll.cli import main

    def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        folder, code = cwd or Path.cwd(), 0
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["reroll", *words])
            patch.setattr(sys, "path", [str(folder), *sys.path])
            patch.setenv("COLUMNS", "160")
            try:
                main()
            except SystemExit as left:
                code = int(left.code or 0)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(["reroll", *words], code, out, err)

    return run


@pytest.fixture
def rlvr_tree(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    return rlvr_tree_in(tmp_path, tiny_model)


@pytest.fixture(scope="module")
def module_rlvr_tree(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    """The same, for a run that several tests look at."""
    return rlvr_tree_in(tmp_path_factory.mktemp("run"), tiny_model)


def rlvr_tree_in(folder: Path, tiny_model: Path) -> dict[str, Any]:
    """A whole RLVR config as plain data: repeat a digit. Its rewards lie beside it, as a user's would."""
    (folder / "reroll_test_rewards.py").write_text(USER_REWARDS)
    rows = [{"prompt": f"say {digit}", "answer": str(digit)} for digit in range(10)]
    data = folder / "digits.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(data)}
    return {
        "pipeline": "rlvr",
        "run": {"name": "test", "runs_dir": str(folder / "runs"), "steps": 3, "seed": 1},
        "policy": {"model": str(tiny_model), "devices": "cpu", "optim": {"lr": 1e-2}},
        "engine": {"devices": "cpu"},
        "data": {"train": [source], "eval": [source]},
        "rewards": {"default": {"kind": "import", "path": "reroll_test_rewards:has_digit"}},
        "reward_workers": {"num_processes": 1},  # Starting another takes longer than these runs.
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
