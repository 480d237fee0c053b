"""The front door in a notebook, where an event loop is running already: in a real kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from reroll_zoo.tiny_models import make_tiny

SETUP = """
import reroll

rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(4)]
bonus = 0.25

def score(prompt, trajectory) -> float:
    return bonus + ("1" in trajectory.text)

small = dict(model="tiny", data=rows, reward=score, prompts_per_step=2, group_size=4, max_tokens=8, lr=1e-3)
"""


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotebookClient]:
    """A kernel that lives in the test's folder and can import what this process can."""
    make_tiny(tmp_path / "tiny")
    repository = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([repository, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    client = NotebookClient(new_notebook(), resources={"metadata": {"path": str(tmp_path)}}, timeout=None)
    with client.setup_kernel():
        yield client


def run(client: NotebookClient, source: str) -> list[dict[str, Any]]:
    """What the cell put out."""
    client.nb.cells.append(new_code_cell(source))
    return list(client.execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)["outputs"])


def printed(outputs: list[dict[str, Any]]) -> str:
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream" and output["name"] == "stdout")


def shown(outputs: list[dict[str, Any]], kind: str) -> list[str]:
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


INTERRUPT_WHEN_TRAINING = """
import os, signal, threading, time
from pathlib import Path

def interrupt():  # what a front end does: a signal to the kernel's process
    path = Path("runs/cut/metrics.jsonl")
    while not path.exists() or '"step": 2' not in path.read_text():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
cut = reroll.train(**small, name="cut", steps=100_000)
is_saved = cut.checkpoint.exists() and cut.checkpoint.name == f"step-{cut.num_steps:06d}"
print("interrupted", cut.interrupted, "saved", is_saved)
"""


def test_ten_lines_in_a_notebook_train_show_a_live_panel_and_answer_and_an_interrupt_saves_and_leaves(
    notebook: NotebookClient,
) -> None:
    outputs = run(notebook, SETUP + 'run = reroll.train(**small, steps=2)\nprint("steps", run.num_steps, run.folder)')
    assert "steps 2 runs/grpo-tiny-1" in printed(outputs)
    panels = [text for text in shown(outputs, "text/plain") if "step 2/2" in text]
    assert len(panels) == 1  # One output, drawn over, with its last state.
    assert "reward" in panels[0]
    assert "<pre" in next(html for html in shown(outputs, "text/html") if "step 2/2" in html)
    outputs = run(notebook, 'run.curve()\nprint(run.metrics[-1]["step"], repr(run.generate("1 + 1 =", max_tokens=3)))')
    assert shown(outputs, "image/png")
    assert printed(outputs).startswith("2 '")
    played = 'print("passed", reroll.evaluate(model="tiny", data=rows, reward=score, max_tokens=8).pass_rate)'
    assert "passed 0." in printed(run(notebook, played))
    assert "interrupted True saved True" in printed(run(notebook, INTERRUPT_WHEN_TRAINING))
