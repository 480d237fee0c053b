"""Environments that misbehave as they are told: by their options when they open, by the action when they are stepped."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from reroll.envs.base import InvalidAction, StepResult
from reroll.types import Message

RELEASE = threading.Event()
"""Ends every hang in this process, so that a test leaves no thread behind."""

WRONG: dict[str, Any] = {
    "none": None,
    "nan": StepResult(messages=({"role": "user", "content": "?"},), reward=float("nan")),
    "infinite info": StepResult(terminated=True, info={"size": float("inf")}),
    "word for reward": StepResult(terminated=True, reward="1"),  # type: ignore[arg-type]
    "word for flag": StepResult(terminated="yes"),  # type: ignore[arg-type]
    "silence": StepResult(),
    "bare text": StepResult(messages="hello"),  # type: ignore[arg-type]
    "no role": StepResult(messages=({"content": "hello"},)),  # type: ignore[typeddict-item]
    "number for content": StepResult(messages=({"role": "user", "content": 3},)),  # type: ignore[typeddict-item]
    "object in message": StepResult(messages=({"role": "user", "content": "x", "extra": object()},)),  # type: ignore[typeddict-unknown-key]
    "long state": StepResult(terminated=True, state="x" * 1_000_000),
}


class Puppet:
    """Counts `go`; does everything else that it is told, good or bad."""

    def __init__(self, *, fault: str = "", diary: str = "") -> None:
        self._fault = fault
        self._diary = Path(diary) if diary else None
        self._count = 0
        self._seed = -1
        self._close = ""
        self._do("init")

    def reset(self, seed: int) -> tuple[Message, ...]:
        self._seed = seed
        self._do("reset")
        if self._fault == "reset nothing":
            return ()
        if self._fault == "reset none":
            return None  # type: ignore[return-value]
        return ({"role": "user", "content": f"seed {seed}"},)

    def step(self, action: str) -> StepResult:
        if action in WRONG:
            answer: StepResult = WRONG[action]
            return answer
        match action.split():
            case ["go"]:
                self._count += 1
            case ["wait", seconds]:
                time.sleep(float(seconds))
            case ["until", gate]:
                Path(f"{gate}.begun").touch()
                while not Path(gate).exists():
                    time.sleep(0.01)
            case ["closing", how]:
                self._close = how
            case ["megabytes"]:
                return StepResult(messages=({"role": "user", "content": "ab" * 2_000_000},), reward=1)
            case ["end"]:
                return StepResult(reward=self._count, terminated=True, info={"success": True})
            case ["where"]:
                info = {"pid": os.getpid(), "thread": threading.get_ident()}
                return StepResult(messages=({"role": "user", "content": "here"},), info=info)
            case ["child"]:
                child = subprocess.Popen(["sleep", "600"])
                return StepResult(messages=({"role": "user", "content": "born"},), info={"pid": child.pid})
            case [fault]:
                _misbehave(fault)
        return StepResult(
            messages=({"role": "user", "content": f"{self._seed}: {self._count}"},), reward=0.5, state=str(self._count)
        )

    def close(self) -> None:
        if self._close:
            _misbehave(self._close)
        if self._diary is not None:
            with self._diary.open("a") as file:
                file.write(f"{self._seed}\n")

    def _do(self, method: str) -> None:
        moment, _, fault = self._fault.partition(" ")
        if moment == method:
            _misbehave(fault)


def _misbehave(fault: str) -> None:
    match fault:
        case "raise":
            raise LookupError("the key is lost")
        case "exit":
            sys.exit("leaving")
        case "hang":
            RELEASE.wait(600)
        case "die":
            os._exit(7)
        case "scold":
            raise InvalidAction("no! " * 1000)
        case "wail":
            raise LookupError("oh! " * 1000)
        case "nonsense":
            raise InvalidAction("say go or end")


class Later:
    """A puppet that has to be awaited."""

    def __init__(self, **options: Any) -> None:
        self._puppet = Puppet(**options)

    async def reset(self, seed: int) -> tuple[Message, ...]:
        await asyncio.sleep(0)
        return self._puppet.reset(seed)

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(600 if action == "sleep" else 0)
        return self._puppet.step(action)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._puppet.close()


NOT_A_CLASS = 3
