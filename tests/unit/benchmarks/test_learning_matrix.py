"""The learning matrix around its measurements: its rows are sound, and its page cannot go stale."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from reroll.config.load import load_config
from reroll.config.presets import presets

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts, no package

from learning_docs import DOCS, expansion, matrix_table, rewritten  # noqa: E402
from learning_matrix import missing_cells, read_cells  # noqa: E402
from learning_rows import NUM_STEPS, ROWS, SHARED_SETTINGS  # noqa: E402

ASKED = {"row": "gspo", "seed": 0, "steps": NUM_STEPS, "settings": list(ROWS["gspo"].settings), "preset": presets()["gspo"]}
DONE = ASKED | {"before": 0.3, "after": 0.9, "seconds": 40.0}


def test_the_page_shows_what_was_measured_and_what_presets_stand_for_today() -> None:
    page = DOCS.read_text()
    assert rewritten(page, read_cells()) == page, "run: python benchmarks/learning_matrix.py --docs-only"


@pytest.mark.parametrize("preset", presets())
def test_every_preset_has_a_section_with_a_formula_and_its_fields(preset: str) -> None:
    found = re.search(rf"^### {re.escape(preset)}\n(.*?)(?=^##)", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, f"write a section ### {preset} in docs/algorithms.md"
    assert "```math" in found[1]
    assert expansion(preset) in found[1]


def test_the_page_names_the_length_of_the_runs() -> None:
    assert f": {NUM_STEPS} steps of" in DOCS.read_text()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_sound_config(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("warm", "teacher", "runs/quickstart-data"):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "config.json").write_text("{}")
    for file in ("train", "held_out"):
        Path(f"runs/quickstart-data/{file}.jsonl").touch()
    row = ROWS[name]
    load_config(ROOT / "examples/quickstart/grpo.yaml", [f"algorithm={row.preset}", *SHARED_SETTINGS, *row.settings])


def test_only_what_is_missing_failed_or_has_other_settings_is_run() -> None:
    wanted = {"seeds": [0], "steps": NUM_STEPS}
    assert missing_cells(["gspo"], [DONE], **wanted) == []
    assert [cell["row"] for cell in missing_cells(["grpo", "gspo"], [DONE], **wanted)] == ["grpo"]
    assert [cell["seed"] for cell in missing_cells(["gspo"], [DONE], seeds=[0, 1], steps=NUM_STEPS)] == [1]
    for other in ({"failed": "diverged"}, {"settings": []}, {"preset": {}}, {"steps": 7}):
        assert missing_cells(["gspo"], [DONE | other], **wanted) == [ASKED]


def test_a_failed_cell_is_shown_with_its_reason_beside_the_others() -> None:
    failed = ASKED | {"seed": 2, "failed": "TrainingDiverged: nan"}
    table = matrix_table([DONE, DONE | {"seed": 1, "after": 0.8}, failed])
    assert "0.30 → **0.85** (0.80 to 0.90); seed 2 failed: TrainingDiverged: nan" in table
    assert "`gspo`" in matrix_table([failed])


def test_shorter_trials_stay_out_of_the_table() -> None:
    assert "gspo" not in matrix_table([DONE | {"steps": 3}])
