"""How many files one reads to follow a token, from the prompt it answers to the weights that it leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))  # scripts, no package

from round_trip import BESIDE, ROOT, files_of_a_token, trace_run

MOST_FILES = 51
"""It only ever goes down: what a step has no use for is decided before the first, and small files that one alone imports join
it. `scripts/round_trip.py` lists the files."""
LANDMARKS = {
    "reroll/rollout/play.py",
    "reroll/infer/embedded/sampler.py",
    "reroll/rewards/base.py",
    "reroll/algo/advantages.py",
    "reroll/tokens/packing.py",
    "reroll/algo/losses.py",
    "reroll/training/torch_strategy.py",
    "reroll/pipeline/weight_sync.py",
}


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return trace_run(tmp_path_factory.mktemp("round_trip"))


def test_a_token_passes_no_more_files_than_before(functions: dict[str, list[str]]) -> None:
    path = files_of_a_token(functions)
    assert set(path) >= LANDMARKS, "the trace has missed some of the way"
    assert len(path) <= MOST_FILES, path


def test_what_is_said_to_run_beside_the_way_exists() -> None:
    assert not [part for part in BESIDE if not (ROOT / part).exists()]
