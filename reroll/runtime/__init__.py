"""Where code runs: threads, processes or what a plug-in brings, behind one interface; devices and leases."""

from __future__ import annotations

from reroll.config.parts import RuntimeConfig
from reroll.runtime.base import Runtime


def make_runtime(config: RuntimeConfig) -> Runtime:
    """The runtime a config asks for. Its libraries are imported only when it is the one."""
    runtime: Runtime = config.make()
    return runtime
