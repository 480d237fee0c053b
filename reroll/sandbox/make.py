"""From a config to a sandbox."""

from __future__ import annotations

from collections.abc import Sequence

from reroll.config.sandbox import LocalSandbox, SandboxConfig
from reroll.errors import SandboxError
from reroll.sandbox.base import Sandbox
from reroll.sandbox.local import LocalPool


def open_sandbox(config: SandboxConfig, *, num_processes: int, preload: Sequence[str] = ()) -> Sandbox:
    """A sandbox that runs up to `num_processes` programs at a time here, or as many as its config says elsewhere.

    Programs that run here find the modules of `preload` imported. Raises SandboxError with the fix if the level asked for
    is not to be had.
    """
    if isinstance(config, LocalSandbox):
        return LocalPool(config, num_processes=num_processes, preload=preload)
    try:
        from reroll.sandbox.remote import RemoteClient
    except ModuleNotFoundError as error:
        raise SandboxError(f"a remote sandbox needs a package: {error}; pip install 'reroll[agents]'") from error
    return RemoteClient(config)
