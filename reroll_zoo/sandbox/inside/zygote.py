"""A warm interpreter: forks one program after the other, and never sees any of them.

It is started without site-packages and with an environment of its own. What the programs import most is imported before
they come. The next supervisor waits in its namespaces for a job, which it reads itself: nothing of a program reaches the
process that the next one is forked from.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import site
import socket
import sys
from contextlib import suppress

from reroll_zoo.sandbox.inside import kernel, program
from reroll_zoo.sandbox.inside.jail import Jail, Settings, make_jail
from reroll_zoo.sandbox.inside.supervise import supervise
from reroll_zoo.sandbox.inside.wire import Job

_IMPORTED = (
    "array",
    "bisect",
    "cmath",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "threading",
    "time",
    "typing",
)
_LEAVE = 99
"""Exit code of a supervisor that the pool has sent home."""


def main(control_fd: int, settings_json: str) -> None:
    """Serve until the pool closes its end of the control socket. Returns in a program's own process, when it is over."""
    settings = Settings.from_json(settings_json)
    control = socket.socket(fileno=control_fd)
    jail = make_jail(settings)
    _prepare(settings)
    try:
        jail.enter(control)
    except (OSError, KeyError) as error:
        sys.exit(str(error))
    program.run(_serve(control, jail))


def _prepare(settings: Settings) -> None:
    """Import what programs will want, and become a process that no stray signal ends."""
    for name in _IMPORTED:
        importlib.import_module(name)
    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.path[:] = [*[path for path in sys.path if path.startswith(settings.folders)], *settings.packages]
    for name in settings.preload:
        with suppress(ImportError):  # The program that imports it will say why it cannot be.
            importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kernel.use_one_arena()
    gc.freeze()


def _serve(control: socket.socket, jail: Jail) -> Job:
    """Run one job after the other. Returns in a program's own process."""
    while True:
        child = os.fork()
        if child == 0:
            return _attend(control, jail)
        _, status = os.waitpid(child, 0)
        jail.clean()
        if status:
            jail.leave()
            os._exit(0 if os.waitstatus_to_exitcode(status) == _LEAVE else 1)


def _attend(control: socket.socket, jail: Jail) -> Job:
    """Wait for one job and see it through."""
    try:
        jail.isolate()
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(1)
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    control.close()
    if not descriptors:
        os._exit(_LEAVE)
    return supervise(socket.socket(fileno=descriptors[0]), jail)
