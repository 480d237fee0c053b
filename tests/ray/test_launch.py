"""The ways into a cluster that docs/launch.md shows, walked for real: `ray start`, then a run that joins it by address."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

BIN = Path(sys.executable).parent
START_TIMEOUT_S = 120


@dataclass(frozen=True)
class Head:
    """A head node of its own: its address, its dashboard's, and an environment that may join it."""

    address: str
    dashboard: str
    env: dict[str, str]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """`ray start --head`, with a token. It is ended by its process id: `ray stop` would end every Ray of this machine."""
    folder = tmp_path_factory.mktemp("head")
    sockets = tempfile.mkdtemp(prefix="reroll-")  # Not in pytest's folder: paths of sockets must be short.
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env.pop("RAY_ADDRESS", None)
    dashboard = _free_port()
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=4", "--disable-usage-stats", "--port=0"]
    command += ["--temp-dir", sockets, "--labels", "pool=here", f"--dashboard-port={dashboard}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        yield Head(_address(folder / "log", process), f"http://127.0.0.1:{dashboard}", env)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_TIMEOUT_S)
        shutil.rmtree(sockets, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the head says that others may join it."""
    for _ in range(START_TIMEOUT_S * 10):
        found = re.search(r"--address='([^']+)'", log.read_text())
        if found:
            return found[1]
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"the head did not start: {log.read_text()}")


@pytest.fixture
def file(rlvr_tree: dict[str, Any], tmp_path: Path) -> Path:
    """A laptop's config: nothing in it knows of a cluster."""
    rlvr_tree["run"]["steps"] = 1
    rlvr_tree["data"]["eval"] = []
    rlvr_tree["rollout"] |= {"prompts_per_step": 2, "group_size": 2}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(rlvr_tree))
    return path


def result_of(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((file.parent / "runs" / "test" / "result.json").read_text())
    return result


@pytest.mark.slow
def test_a_laptops_config_joins_a_cluster_by_two_overrides(head: Head, file: Path) -> None:
    command = [BIN / "reroll", "train", file, "runtime.kind=ray", f"runtime.address={head.address}"]
    done = subprocess.run(command, env=head.env, capture_output=True, text=True, cwd=file.parent)
    assert done.returncode == 0, done.stderr
    assert result_of(file)["steps"] == 1


@pytest.mark.slow
def test_a_run_may_be_handed_in_as_a_ray_job(head: Head, file: Path) -> None:
    pytest.importorskip("aiohttp_cors", reason="jobs need Ray's dashboard: pip install 'ray[default]'")
    run = f"cd {file.parent} && {BIN / 'reroll'} train {file} runtime.kind=ray runtime.address=auto"
    command = [BIN / "ray", "job", "submit", "--address", head.dashboard, "--", "bash", "-c", run]
    done = subprocess.run(command, env=head.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of(file)["steps"] == 1


@pytest.mark.slow
def test_without_the_clusters_token_the_run_says_what_to_set(head: Head, file: Path) -> None:
    env = {name: value for name, value in head.env.items() if not name.startswith("RAY_AUTH")}
    command = [BIN / "reroll", "train", file, "runtime.kind=ray", f"runtime.address={head.address}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=file.parent)
    assert done.returncode == 1
    assert f"cannot join the Ray cluster at {head.address}" in done.stderr
    assert "RAY_AUTH_MODE=token" in done.stderr
