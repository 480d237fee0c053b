"""What the program's own process does: become the program."""

from __future__ import annotations

import atexit
import builtins
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import NoReturn

from reroll_zoo.sandbox.inside.wire import Job

_NAME = "main.py"


def run(job: Job) -> NoReturn:
    """Run the job in this process, which ends with it."""
    folder = os.getcwd()
    os.environ.update(HOME=folder, TMPDIR=folder)
    if job.command:
        _execute(job.command)
    _run_python(job.source, folder)


def _execute(command: tuple[str, ...]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.environ["TMPDIR"] = "."  # The folders above may be closed to the program's user.
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _run_python(source: bytes, folder: str) -> NoReturn:
    """As `python main.py` would: a fresh `__main__`, streams of its own, a traceback and code 1 for what it does not catch."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "reroll_zoo"]:
        del sys.modules[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams()
    sys.argv = [_NAME]
    sys.path.insert(0, folder)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=f"{folder}/{_NAME}", __builtins__=builtins)
    sys.modules["__main__"] = main
    text = source.decode(errors="replace")
    linecache.cache[_NAME] = (len(text), None, text.splitlines(keepends=True), _NAME)
    code = _exit_code(lambda: exec(compile(text, _NAME, "exec", dont_inherit=True), main.__dict__))
    _finish(main, code)


def _exit_code(act: Callable[[], None]) -> int:
    """What a process that does this ends with. Tells on standard error what was raised and not caught."""
    try:
        act()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _tell(error)
        return 1
    return 0


def _finish(main: types.ModuleType, code: int) -> NoReturn:
    """End as an interpreter does, without taking itself apart: copying all the memory that it shares would cost 10 ms."""
    join_threads: Callable[[], None] = vars(threading)["_shutdown"]
    steps = [join_threads, atexit._run_exitfuncs, main.__dict__.clear, sys.stdout.flush, sys.stderr.flush]
    codes = [_exit_code(step) for step in steps]
    os._exit(code or max(codes))


def _tell(error: BaseException) -> None:
    """Print the traceback without the frames that are ours, or let the program's own hook do it."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, frames)
        return
    sys.stdout.flush()
    traceback.print_exception(type(error), error, frames)


def _open_streams() -> None:
    """New streams over the program's own descriptors: those of the warm interpreter belong to another life."""
    for descriptor, name, mode, errors in (
        (0, "stdin", "r", "surrogateescape"),
        (1, "stdout", "w", "surrogateescape"),
        (2, "stderr", "w", "backslashreplace"),
    ):
        stream = os.fdopen(descriptor, mode, 1 if name == "stderr" else -1, "utf-8", errors, closefd=False)
        vars(sys)[name] = vars(sys)[f"__{name}__"] = stream
