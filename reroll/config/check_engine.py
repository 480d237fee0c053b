"""What an engine's settings promise beyond their types."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from reroll.config.host import foreign_environment, num_visible_gpus, parse_devices
from reroll.config.parts import Devices, DeviceSelection, PooledEngine, RayRuntime, SglangEngine, VllmEngine
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation

_FIND_SGLANG = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"


def engine_violations(config: RlvrConfig) -> Iterator[Violation]:
    """Where vLLM or sglang cannot run as asked."""
    engine, is_ray = config.engine, isinstance(config.runtime, RayRuntime)
    if not isinstance(engine, PooledEngine):
        return
    if isinstance(engine, SglangEngine):
        yield from _sglang_violations(engine, is_ray=is_ray)
    if isinstance(engine, VllmEngine) and engine.num_workers > 1 and not is_ray:
        yield Violation(
            "engine.num_workers",
            "a process holds one vLLM engine, and the local runtime is one process",
            "set it to 1, or runtime.kind to ray",
        )
    num_gpus = _num_named(engine.devices)
    if num_gpus is not None and num_gpus < engine.tensor_parallel:
        yield Violation(
            "engine.devices",
            f"names {num_gpus} GPU{'s' if num_gpus > 1 else ''}, and each worker is spread over {engine.tensor_parallel}",
            f"name at least {engine.tensor_parallel} of one node, or lower engine.tensor_parallel",
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    if engine.max_model_len is not None and engine.max_model_len < longest:
        yield Violation(
            "engine.max_model_len",
            f"{engine.max_model_len} is less than max_prompt_tokens + max_tokens = {longest}",
            f"set it to at least {longest}, or leave it out",
        )


def _sglang_violations(engine: SglangEngine, *, is_ray: bool) -> Iterator[Violation]:
    if engine.devices == "cpu" or (engine.devices == "auto" and not is_ray and not num_visible_gpus()):
        yield Violation("engine.devices", "sglang needs a GPU", "name GPUs, or set engine.kind to embedded or vllm")
    if is_ray:
        return  # The interpreter is on the nodes that get an engine.
    fix = "make one that has: scripts/setup_sglang.sh FOLDER, and name FOLDER/bin/python"
    if (python := shutil.which(engine.python)) is None:
        yield Violation("engine.python", f"there is no interpreter {engine.python}", fix)
    elif subprocess.run([python, "-c", _FIND_SGLANG], env=foreign_environment(), check=False).returncode:
        yield Violation("engine.python", f"{engine.python} has no package sglang", fix)


def _num_named(devices: Devices) -> int | None:
    """GPUs that are named; None where they are not: `auto`, the CPU, or what is no device at all."""
    if isinstance(devices, DeviceSelection):
        return devices.gpus
    if devices in ("auto", "cpu"):
        return None
    try:
        return len(parse_devices(devices))
    except ValueError:
        return None  # Reported as such.
