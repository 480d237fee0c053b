"""A library's scorer, asked inside the sandbox."""

from __future__ import annotations

import base64
import pickle
import secrets
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from reroll.errors import SandboxError
from reroll_zoo.sandbox.base import Limits, Program
from reroll_zoo.sandbox.blocking import shared_sandbox
from reroll_zoo.sandbox.config import LocalSandboxConfig

_IMPORTED_MB = 512
"""Address space of a process that has imported what scorers import."""
_STDERR_CHARS = 300


class ContainedScorer:
    """Scores each answer in a process of its own, which is forked from one that has imported the library's module.

    An answer that the scorer runs as code may name mathematics and the words of the reference; one that names more, or takes
    more than its time or memory, scores 0. Safe to use from many threads.
    """

    def __init__(self, scorer: str, *, module: str, sandbox: LocalSandboxConfig, wall_s: float, memory_mb: int) -> None:
        """`scorer`: our text, which defines `score(given)` and finds what makes up a task in its global names.

        Raises SandboxError with the fix if nothing on this machine contains programs.
        """
        self._scorer = scorer
        packaged = sandbox.model_copy(update={"site_packages": True})  # The library is one of them.
        self._sandbox = shared_sandbox(packaged, (module,))
        self._limits = Limits(wall_s=wall_s, cpu_s=wall_s, memory_mb=_IMPORTED_MB + memory_mb)

    def score(self, task: Mapping[str, Any], given: str, *, reference: str) -> float:
        """What the scorer pays. Raises SandboxError if the sandbox does not work or the library does not work in it."""
        token = secrets.token_hex()
        job = {"scorer": self._scorer, "task": dict(task), "given": given, "reference": reference, "token": token}
        stdin = base64.b64encode(pickle.dumps(job)).decode()
        ran = self._sandbox.run(Program(source=_driver(), stdin=stdin, limits=self._limits))
        said = [line.removeprefix(token).strip() for line in ran.stdout.splitlines() if line.startswith(token)]
        if said[:1] != ["ready"]:
            raise SandboxError(f"a scorer does not work inside it: {ran.stderr[-_STDERR_CHARS:].strip() or ran.status}")
        return float(said[1]) if len(said) == 2 else 0.0


@cache
def _driver() -> str:
    return (resources.files(__package__) / "inside.py").read_text()
