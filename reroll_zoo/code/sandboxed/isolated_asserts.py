"""Runs tests that cannot be taken apart into questions and expected values, out of the program's reach.

The program lives in a child process, the tests in this one, and only plain values pass between them. What the program makes of
`==`, of builtins or of its own frames stays in its own process. A program that returns an object of its own shows the tests a
`ProgramObject`: it can be called, indexed and asked for attributes, but equals nothing but itself.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from contextlib import suppress
from typing import IO, Any

from reroll_zoo.code.sandboxed.wire import decode, encode, load, take_stdio, tell

ALONE = "no second process"
"""What is told where the sandbox forbids child processes."""
PREDICATES = {name for name in (*dir(str), *dir(frozenset), *dir(float)) if name.startswith("is") or name.endswith("with")}
"""Questions to a text, a set or a number that tell it what is expected, as in `f(3).issubset({1, 2})`."""
PR_SET_DUMPABLE = 4


def main() -> None:
    """Run the tests of the job on stdin and tell which passed, on lines that begin with the job's token.

    The order keeps the program away from both: its process is forked before they are read, and gets the program only when stdin
    is empty and this process hidden.
    """
    try:
        program = ProgramProcess()
    except OSError:
        program = None
    job = json.loads(sys.stdin.read())
    out, token = take_stdio(), job["token"]
    if program is None:
        tell(out, {"broken": ALONE}, token=token)
        os._exit(1)
    hide()
    try:
        # Only names that the tests want are the program's to give: it must not lend them its `abs` or its `math`.
        given = program.ask({"program": job["program"], "setup": job["setup"], "own": job["own"]})
        names = {name: given[name] for name in job["own"] if name in given}
        names |= {name: __import__(name) for name in job["modules"]}
        exec(compile(job["setup"], "<setup>", "exec"), names)
    except Exception as error:
        tell(out, {"broken": type(error).__name__}, token=token)
        os._exit(1)
    tell(out, {"ready": True}, token=token)
    for test in job["tests"]:
        passed = _passes(test, names)
        tell(out, {"passed": passed}, token=token)
        if job["stop_early"] and not passed:
            break
    os._exit(0)


def _passes(test: str, names: dict[str, Any]) -> bool:
    try:
        exec(compile(test, "<test>", "exec"), dict(names))
    except BaseException:
        return False
    return True


def hide() -> None:
    """Forbid other processes of this user to look into this one, where the system knows how."""
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


class ProgramProcess:
    """The program in a process of its own, asked over two pipes."""

    def __init__(self) -> None:
        requests, to_program = os.pipe()
        from_program, replies = os.pipe()
        if os.fork() == 0:
            os.close(to_program)
            os.close(from_program)
            os.close(take_stdio())
            with suppress(BaseException):
                _serve(os.fdopen(requests), os.fdopen(replies, "w"))
            os._exit(0)
        os.close(requests)
        os.close(replies)
        self._requests, self._replies = os.fdopen(to_program, "w"), os.fdopen(from_program)

    def ask(self, request: dict[str, Any]) -> Any:
        """What the program answers; raises what it raises, and RuntimeError once it is gone."""
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        reply = json.loads(self._replies.readline() or '{"raised": "RuntimeError"}')
        if "raised" in reply:
            kind = vars(builtins).get(reply["raised"])
            raise kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(reply["raised"])
        return decode(reply["value"], lambda _, number: ProgramObject(self, number))


class ProgramObject:
    """An object that stays with the program. Compared and hashed by identity, so no `==` of the program's decides a test."""

    _reroll_program: ProgramProcess
    _reroll_number: int

    def __init__(self, program: ProgramProcess, number: int) -> None:
        self.__dict__.update(_reroll_program=program, _reroll_number=number)

    def __getattr__(self, name: str) -> Any:
        if name in PREDICATES:
            raise AttributeError(f"a program's object has no {name} of Python's")
        return self._reroll_program.ask({"of": self._reroll_number, "name": name})

    def __setattr__(self, name: str, value: Any) -> None:
        self.__getattr__("__setattr__")(name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sent = encode([list(args), kwargs], _send_remote)
        return self._reroll_program.ask({"of": self._reroll_number, "sent": sent})

    def __len__(self) -> int:
        try:
            return int(self.__getattr__("__len__")())
        except AttributeError as error:
            # Python asks every iterator for its length, and takes only this for a no.
            raise TypeError(*error.args) from None

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__getattr__("__setitem__")(key, value)

    def __iter__(self) -> Any:
        return self.__getattr__("__iter__")()

    def __next__(self) -> Any:
        return self.__getattr__("__next__")()

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self.__getattr__("__str__")())


def _send_remote(value: Any) -> Any:
    if isinstance(value, ProgramObject):
        return {"object": value._reroll_number}
    raise TypeError(f"a {type(value).__name__} cannot be given to the program")


def _serve(requests: IO[str], replies: IO[str]) -> None:
    """In the program's process: run it, then answer until the tests are over."""
    objects: list[Any] = []

    def keep(value: Any) -> Any:
        objects.append(value)
        return {"object": len(objects) - 1}

    for line in requests:
        try:
            reply = {"value": encode(_do(json.loads(line), objects), keep)}
        except BaseException as error:
            reply = {"raised": type(error).__name__}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _do(request: dict[str, Any], objects: list[Any]) -> Any:
    if "program" in request:
        names = load(request["program"], request["setup"])
        return {name: names[name] for name in request["own"] if name in names}
    target = objects[request["of"]]
    if "name" in request:
        return getattr(target, request["name"])
    args, kwargs = decode(request["sent"], lambda _, number: objects[number])
    return target(*args, **kwargs)
