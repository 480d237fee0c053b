"""The table of families: made of what was measured on each device."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))  # scripts, no package

from model_families import PAGE, RESULTS
from model_page import Results, page

from reroll_zoo.model_check.contract import Measured

GOOD = Measured(packed=1e-6, siblings=2e-6, gradient=1e-6, step=3e-6, lora=1e-6, engine=1e-6, pushed=1e-6, num_same=4, half=1.0)


def row(text: str, family: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {family} |")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_what_was_measured_is_read_as_it_was_written_and_stands_in_its_columns(tmp_path: Path) -> None:
    cpu = Results({"device": "CPU", "transformers": "5"}, {"llama": GOOD, "qwen2": GOOD}, {"llama": ["sp"], "qwen2": []})
    bad = Measured(**{**{name: getattr(GOOD, name) for name in ("packed", "siblings", "num_same")}, "engine": 0.5})
    gpu = Results({"device": "GPU 9000", "transformers": "5"}, {"llama": GOOD, "qwen2": bad}, {"llama": ["sp"], "qwen2": []})
    gpu.write(tmp_path / "gpu.json")
    assert Results.read(tmp_path / "gpu.json") == gpu

    text = page(cpu, gpu)

    gaps = ["1e-06", "2e-06", "1e-06", "3e-06", "1e-06", "1e-06", "1e-06"]
    assert row(text, "llama") == ["llama", *gaps, "4", "1.0", "3e-06", "1.0", "sp"]
    assert row(text, "qwen2")[-3] == "**engine**"
    assert "GPU 9000" in text
    assert "GPU 9000" not in page(cpu, Results.read(tmp_path / "none.json"))


def test_the_page_is_made_of_the_files_beside_it() -> None:
    assert PAGE.read_text() == page(*(Results.read(file) for file in RESULTS.values()))
