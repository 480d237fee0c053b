"""Where a placement puts workers in one process, and what it refuses to look up."""

from __future__ import annotations

import pytest

from reroll.config.parts import DeviceSelectionConfig
from reroll.errors import RerollError
from reroll.runtime.base import Placement, WorkerInfo
from reroll.runtime.local import LocalRuntime


class Scout:
    """A worker that says where it was put."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info

    def device(self) -> str:
        return self.info.device


async def test_a_worker_that_spans_gpus_is_told_the_first() -> None:
    placement = Placement("engine", ("cpu", "1", ("2", "3"), ("cpu",)))
    assert placement.devices_of_workers == (("cpu",), ("1",), ("2", "3"), ("cpu",))
    async with LocalRuntime() as runtime:
        workers = await runtime.spawn(Scout, placement)
        assert await workers.broadcast(Scout.device) == ["cpu", "cuda:1", "cuda:2", "cpu"]


async def test_one_process_has_no_nodes_to_select_from() -> None:
    async with LocalRuntime() as runtime:
        with pytest.raises(RerollError, match=r"runtime: \{kind: ray\}"):
            runtime.devices(DeviceSelectionConfig(gpus=1))
