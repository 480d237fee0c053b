"""Where code runs: threads, processes or Ray actors behind one interface; devices and leases."""

from __future__ import annotations

from reroll.config.parts import LocalRuntimeConfig, ProcessesRuntimeConfig, RuntimeConfig
from reroll.errors import RerollError
from reroll.runtime.base import Runtime
from reroll.runtime.local import LocalRuntime
from reroll.runtime.processes import ProcessRuntime


def make_runtime(config: RuntimeConfig) -> Runtime:
    """The runtime a config asks for. Ray is imported only when it is the one."""
    if isinstance(config, LocalRuntimeConfig):
        return LocalRuntime()
    if isinstance(config, ProcessesRuntimeConfig):
        return ProcessRuntime(watchdog_s=config.watchdog_s)
    try:
        from reroll.runtime.ray import RayRuntime
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise RerollError("runtime.kind is ray, but the ray package is not installed: pip install 'reroll[ray]'") from error
    return RayRuntime(config)
