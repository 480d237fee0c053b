"""The error tree. A user error says what is wrong and what to do; anything else is our bug and keeps its traceback."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_TOLD = 2000
"""Characters."""


class RerollError(Exception):
    """Root of every error that reroll raises on purpose."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing wrong with a config: where it is, what is wrong, and the fix."""

    path: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem} ({self.fix})"


class ConfigError(RerollError):
    """A config that cannot run. Holds every violation found, not only the first."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(str(violation) for violation in violations))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Violation, ...]]]:
        return type(self), (self.violations,)


class DataError(RerollError):
    """A prompt source that cannot be read: names the file and the line."""


class ModelError(RerollError):
    """A model or tokenizer that cannot be loaded or used as asked."""


class WorkerError(RerollError):
    """A worker raised: the message carries the worker's own traceback."""


class WorkerDied(WorkerError):
    """A worker's process is gone (killed, out of memory, node lost)."""

    def __init__(self, message: str, *, how: str = "is gone", had_read: bool | None = None) -> None:
        super().__init__(message)
        self.how = how
        """What became of the process: `died (SIGSEGV)`."""
        self.had_read = had_read
        """Whether it had read the call, which may then be the cause; None: nobody can tell."""

    @property
    def was_killed(self) -> bool:
        """Whether it is known to be somebody else's doing: a person's, or the system's for want of memory."""
        return "(SIGKILL)" in self.how


class WorkerTimeout(WorkerError):
    """A worker took longer than its call was given: it was ended, and another is in its place."""


class NoRoom(RerollError):
    """The machines that there are have no place for a worker."""


class SampleError(RerollError):
    """Root of what fails a sample alone. Its message may quote the policy, and is told without what steers a terminal."""

    def __str__(self) -> str:
        return printable(super().__str__())


class EnvError(SampleError):
    """An environment failed: becomes a status on the trajectory, never escapes a step."""


class EnvLost(EnvError):
    """The place where an environment ran is gone, with every episode in it. No episode's own doing: each is played again."""


class RewardError(SampleError):
    """A reward failed: becomes a status on the trajectory, never escapes a step."""


class RewardLost(RewardError):
    """What was to judge a sample is gone before it could: no doing of the sample, which is judged again."""


class RewardRaised(RewardError):
    """A reward raised what it should not have: a bug in it, or an answer that it was not written for."""

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """What was raised and where: the same for equal faults."""


class SandboxError(RerollError):
    """A sandbox cannot do its work: the level asked for is not to be had, or it has no place to run a program."""


class TooManyFailures(RerollError):
    """So many samples failed that going on would train on noise."""


class TrainingDiverged(RerollError):
    """The loss or the gradient is not finite. The last checkpoint is intact."""


class SamplerMismatch(RerollError):
    """What writes the samples is not what is trained: their log-probs are far apart. The last checkpoint is intact."""


class RunFolderError(RerollError):
    """The run folder cannot be created or written."""


class WeightsError(RerollError):
    """New weights did not reach the engines. The last checkpoint is intact."""


def short_error(error: BaseException) -> str:
    """Type, message and place of an exception in user code, short enough for a status and fit for a terminal."""
    told = printable("".join(traceback.format_exception_only(error)).strip())
    if len(told) > _MAX_TOLD:  # Some messages hold all of what could not be read.
        told = f"{told[: _MAX_TOLD // 2]} … {told[-_MAX_TOLD // 2 :]}"
    return told + place_of(error)


def place_of(error: BaseException) -> str:
    """Where an exception was raised: ` (file:line)`; empty if it never was."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return f" ({frames[-1][0].f_code.co_filename}:{frames[-1][1]})" if frames else ""


def printable(text: str) -> str:
    """Control characters and halves of characters as pictures: what a model writes must not steer a terminal, or stop it."""
    return text.translate(_PICTURES)


_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD) | {0x7F: ord("␡")}
