"""Ray as a run on one machine starts it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch

from reroll.runtime import make_runtime
from reroll.runtime.base import Placement, WorkerInfo
from reroll.runtime.devices import num_usable_cores
from reroll_zoo.ray.config import RayRuntimeConfig

FREE = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


class TorchWorker:
    """A worker that computes."""

    def __init__(self, info: WorkerInfo) -> None:
        self.device = info.device

    def num_threads(self) -> int:

        return torch.get_num_threads()

    def pid(self) -> int:
        return os.getpid()


def threads_of_a_local_run() -> int:
    """Asked in a process of its own: this one may have been told otherwise."""
    script = "import torch; print(torch.get_num_threads())"
    return int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=FREE).stdout)


async def test_a_run_starts_ray_for_itself_shares_the_cores_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert not ray.is_initialized()
    async with make_runtime(RayRuntimeConfig(kind="ray")) as runtime:
        assert ray.cluster_resources()["CPU"] >= 4
        lone = await runtime.spawn(TorchWorker, Placement("policy", ("cpu",)))
        pair = await runtime.spawn(TorchWorker, Placement("engine", ("cpu", "cpu")))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        told = await runtime.spawn(TorchWorker, Placement("critic", ("cpu",)))
        roles = (lone, pair, told)
        lone_threads, pair_threads, told_threads = await asyncio.gather(
            *(role.broadcast(TorchWorker.num_threads) for role in roles)
        )
        [pid] = await lone.broadcast(TorchWorker.pid)
    assert lone_threads == [threads_of_a_local_run()], "a lone worker computes with the threads of a local run"
    assert pair_threads == [max(1, num_usable_cores() // 2)] * 2
    assert told_threads == [1]
    assert not ray.is_initialized()
    deadline_s = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_without_the_ray_package_only_the_ray_runtime_fails_and_says_what_to_install() -> None:
    script = """
import sys
sys.modules["ray"] = None
from reroll.config.parts import LocalRuntimeConfig
from reroll_zoo.ray.config import RayRuntimeConfig
from reroll.errors import RerollError
from reroll.runtime import make_runtime
make_runtime(LocalRuntimeConfig())
try:
    make_runtime(RayRuntimeConfig(kind="ray"))
except RerollError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'reroll[ray]'" in done.stdout


def test_making_a_local_runtime_imports_neither_ray_nor_torch() -> None:
    script = """
import sys
from reroll.config.parts import LocalRuntimeConfig
from reroll.runtime import make_runtime
make_runtime(LocalRuntimeConfig())
assert "ray" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
