"""A run with its page beside it: what it shows while the run goes on, and that it is paused, saved and stopped by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

from reroll.config.load import parse_config
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll_zoo.page.companion import PageCompanion
from reroll_zoo.page.run_data import RunData
from reroll_zoo.page.server import TOKEN_HEADER


def until(holds: Callable[[], Any], *, patience_s: float = 120.0) -> Any:
    """The first answer that is true."""
    deadline_s = time.monotonic() + patience_s
    while not (found := holds()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return found


def test_a_run_is_watched_paused_saved_and_stopped_from_its_page(
    rlvr_tree: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rlvr_tree["run"] |= {"steps": 10_000}
    rlvr_tree["data"]["eval"] = []
    config = parse_config(rlvr_tree, folder=tmp_path)
    outcomes: list[Outcome] = []
    run = threading.Thread(target=lambda: outcomes.append(train(config, code_folder=tmp_path, companion=PageCompanion(port=0))))
    run.start()
    printed = ""

    def address() -> re.Match[str] | None:
        nonlocal printed
        assert run.is_alive()
        printed += capsys.readouterr().out
        return re.search(r"page: (http://\S+)\?token=(\S+)", printed)

    url, token = until(address).groups()

    def ask(path: str, *, method: str = "GET") -> dict[str, Any]:
        with urlopen(Request(f"{url}api/{path}", method=method, headers={TOKEN_HEADER: token})) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    try:
        until(lambda: ask("run")["step"] >= 2)
        assert ask("run")["status"] == "running"
        assert ask("events?since=0")["lives"]
        ask("hands/pause", method="POST")
        assert until(lambda: ask("hands")["is_paused"])
        ask("hands/checkpoint", method="POST")  # Heeded once the step under way is over: nothing moves after it.
        [saved] = until(lambda: ask("run")["checkpoints"])
        assert saved["step"] == ask("run")["step"]
        ask("hands/resume", method="POST")
        until(lambda: ask("run")["step"] > saved["step"])
    finally:
        ask("hands/stop", method="POST")
        run.join()
    [outcome] = outcomes
    assert outcome.interrupted
    assert outcome.num_steps > saved["step"]
    assert RunData(outcome.folder).run()["status"] == "interrupted"


def test_the_page_of_a_finished_run_tells_all_of_it(rlvr_tree: dict[str, Any], tmp_path: Path) -> None:
    outcome = train(parse_config(rlvr_tree, folder=tmp_path), code_folder=tmp_path)
    data = RunData(outcome.folder)
    assert (data.run()["status"], data.run()["step"]) == ("finished", 3)
    trained = data.samples(phase="trained", limit=200)
    assert trained["total"] == 3 * 4 * 4
    assert {row["status"] for row in trained["rows"]} <= {"completed", "truncated"}
    answer = data.sample(trained["rows"][-1]["id"])
    assert len(answer["siblings"]) == 4
    [turn] = answer["episode"]["turns"]
    assert turn["shown"][-1]["content"].startswith("say ")
    assert len(turn["pieces"]) == len(turn["logp"]) == answer["life"]["tokens"]
    steps = [kind for _, kind, *_ in data.events(since=0, marks=0)["marks"]]
    assert steps == ["begun", *["taken", "stepped"] * 3]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", "processes"])
def test_the_page_of_a_killed_controller_comes_back_under_its_address_with_its_token(
    rlvr_tree: dict[str, Any], tmp_path: Path, runtime: str
) -> None:
    rlvr_tree |= {"runtime": {"kind": runtime}, "checkpoint": {"every": 2}}
    rlvr_tree["run"] |= {"steps": 100_000}
    rlvr_tree["data"]["eval"] = []
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(rlvr_tree))
    command = [sys.executable, "-m", "reroll", "train", "run.yaml", "--page", "--port", "0", "--restarts", "3"]
    said = tmp_path / "said.txt"
    with said.open("wb") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:

        def printed() -> list[str]:
            assert process.poll() is None, said.read_text()
            return re.findall(r"page: http://\S+", said.read_text())

        [address] = until(printed)
        url, token = address.removeprefix("page: ").split("?token=")

        def ask(path: str, *, method: str = "GET") -> dict[str, Any]:
            """Empty while nobody answers."""
            assert process.poll() is None, said.read_text()
            try:
                with urlopen(Request(f"{url}api/{path}", method=method, headers={TOKEN_HEADER: token})) as response:
                    answer: dict[str, Any] = json.loads(response.read())
                    return answer
            except OSError:
                return {}

        until(lambda: ask("run")["step"] >= 3)
        boot = ask("run")["boot"]
        controller = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        os.kill(controller, signal.SIGKILL)
        until(lambda: ask("run").get("boot", boot) != boot)  # Another server, at the same place.
        until(lambda: ask("hands").get("may"))
        until(lambda: [kind for _, kind, *_ in ask("events")["marks"]].count("begun") == 2)
        until(lambda: ask("run")["step"] >= 5)
        assert printed() == [address, address]
        ask("hands/stop", method="POST")
        assert process.wait(120) == 130
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
