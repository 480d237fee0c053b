"""The checker finds each fault by its own check, and finds none in the bundled environments."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from reroll.config.envs import EnvConfig
from reroll.envs.base import Env, InvalidAction, StepResult
from reroll.envs.make import make_env
from reroll.errors import EnvError
from reroll.types import Message
from reroll_zoo.env_check.check import Check, Report, Verdict, check_env, listed


class Count:
    """Say `up` three times. Every fault is a subclass that gets one thing wrong."""

    def __init__(self) -> None:
        self.count = 0
        self.goal = 0

    def reset(self, seed: int) -> tuple[Message, ...]:
        self.count, self.goal = 0, 3
        return ({"role": "user", "content": f"Say up. Room {random.Random(seed).random()}."},)

    def step(self, action: str) -> StepResult:
        if self.count == self.goal:
            raise EnvError("it is over")
        if action not in ("up", "Say"):
            raise InvalidAction("say up")
        self.count += 1
        return self.outcome()

    def outcome(self) -> StepResult:
        is_over = self.count == self.goal
        messages: tuple[Message, ...] = () if is_over else ({"role": "user", "content": f"{self.count}"},)
        return StepResult(messages=messages, reward=float(is_over), terminated=is_over, state=str(self.count))

    def close(self) -> None:
        self.goal = self.count


class Lucky(Count):
    def outcome(self) -> StepResult:
        return StepResult(
            messages=({"role": "user", "content": "?"},), reward=random.random(), terminated=self.count == self.goal
        )


class Shared(Count):
    total = 0

    def reset(self, seed: int) -> tuple[Message, ...]:
        Shared.total = 0
        return super().reset(seed)

    def outcome(self) -> StepResult:
        Shared.total += 1
        return StepResult(
            messages=({"role": "user", "content": str(Shared.total)},), reward=1, terminated=self.count == self.goal
        )


class Deaf(Count):
    def reset(self, seed: int) -> tuple[Message, ...]:
        return super().reset(0)


class Endless(Count):
    def outcome(self) -> StepResult:
        self.count = 0
        return StepResult(messages=({"role": "user", "content": "on"},))


class NoNumber(Count):
    def outcome(self) -> StepResult:
        return StepResult(terminated=True, reward=float("nan"))


class NoEnd(Count):
    def outcome(self) -> StepResult:
        return StepResult()


class Charges(Count):
    """Changes its state, then refuses."""

    def step(self, action: str) -> StepResult:
        if action not in ("up", "Say"):
            self.count = min(self.count + 1, 2)
        return super().step(action)


class Mute(Count):
    def step(self, action: str) -> StepResult:
        try:
            return super().step(action)
        except InvalidAction:
            raise InvalidAction from None


class Brittle(Count):
    def step(self, action: str) -> StepResult:
        try:
            return super().step(action)
        except InvalidAction:
            raise KeyError(action) from None


class PaysTwice(Count):
    def step(self, action: str) -> StepResult:
        return StepResult(reward=1, terminated=True) if self.count == self.goal else super().step(action)


class Patient(Count):
    def step(self, action: str) -> StepResult:
        return StepResult(terminated=True) if self.count == self.goal else super().step(action)


class ClosesOnce(Count):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise ValueError("closed already")
        self.is_closed = True


class NeedsReset(Count):
    def __init__(self) -> None:
        pass

    def close(self) -> None:
        self.goal += 1


class OddRole(Count):
    def reset(self, seed: int) -> tuple[Message, ...]:
        return ({"role": "narrator", "content": "Say up."}, *super().reset(seed))


class Blank(Count):
    def reset(self, seed: int) -> tuple[Message, ...]:
        return (*super().reset(seed), {"role": "user", "content": " "})


class Long(Count):
    def reset(self, seed: int) -> tuple[Message, ...]:
        return ({"role": "user", "content": "Say up " * 5000}, *super().reset(seed))


class BadBirth(Count):
    def __init__(self) -> None:
        raise OSError("no board")


class Foreign(Count):
    """Nothing that it shows is an action."""

    def step(self, action: str) -> StepResult:
        return super().step({"hoch": "up"}.get(action, "?"))


class Later(Count):
    async def reset(self, seed: int) -> tuple[Message, ...]:  # type: ignore[override]
        return super().reset(seed)

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


def report_on(make: Callable[[], Any], **settings: Any) -> Report:
    return check_env(make, seeds=range(3), **settings)


def found(report: Report, verdict: Verdict) -> dict[str, Check]:
    return {check.name: check for check in report.checks if check.verdict is verdict}


@pytest.mark.parametrize("make", [Count, Later, Patient])
def test_a_sound_environment_passes_every_check(make: Callable[[], Any]) -> None:
    report = report_on(make)
    assert report.is_ok
    assert len(found(report, Verdict.PASSED)) == len(report.checks) == 12


@pytest.mark.parametrize(
    ("make", "name", "detail"),
    [
        (Lucky, "equal seeds and actions give equal episodes", "seed 0, step 1 ('up'): reward changed"),
        (Shared, "episodes side by side do not disturb each other", "messages changed"),
        (Endless, "plays", "not over after 1000 steps"),
        (NoNumber, "plays", "gave the reward nan"),
        (NoEnd, "plays", "gave no message and did not end the episode"),
        (Charges, "an invalid action leaves the state unchanged", "changed"),
        (Mute, "an invalid action leaves the state unchanged", "InvalidAction has no message"),
        (Brittle, "an invalid action leaves the state unchanged", "raised KeyError"),
        (PaysTwice, "a step after the end is an error or harmless", "it goes on, with reward 1"),
        (ClosesOnce, "close may be called twice, and before reset", "ValueError: closed already"),
        (NeedsReset, "close may be called twice, and before reset", "AttributeError"),
        (OddRole, "messages are well-formed", "narrator"),
        (Blank, "messages are well-formed", "no content"),
        (BadBirth, "plays", "OSError: no board"),
        (Foreign, "plays", "no action was found"),
    ],
)
def test_a_fault_is_found_by_its_own_check_and_comes_with_a_fix(make: Callable[[], Any], name: str, detail: str) -> None:
    report = report_on(make, policy=None if make is Foreign else up_first)
    assert not report.is_ok
    failed = found(report, Verdict.FAILED)
    assert detail in failed[name].detail
    assert failed[name].fix
    # What cannot be built cannot be closed either; and luck spoils every comparison.
    assert len(failed) == 1 or make in (BadBirth, Lucky)


def up_first(env: Env, messages: object, rng: object) -> list[str]:
    return ["up"]


def test_equal_instances_and_long_messages_are_warnings() -> None:
    report = report_on(Deaf)
    assert report.is_ok
    assert list(found(report, Verdict.WARNING)) == ["different seeds give different instances"]
    warning = found(report_on(Long), Verdict.WARNING)["messages are well-formed"]
    assert "35,000 characters" in warning.detail


def test_instances_that_begin_alike_and_answer_differently_differ() -> None:
    class Secret(Count):
        """What is drawn from the seed shows only in the reward."""

        def reset(self, seed: int) -> tuple[Message, ...]:
            shown = super().reset(0)
            self.seed = seed
            return shown

        def step(self, action: str) -> StepResult:
            return replace(super().step(action), reward=float(self.seed))

    report = report_on(Secret)
    assert not found(report, Verdict.WARNING)
    detail = found(report, Verdict.PASSED)["different seeds give different instances"].detail
    assert "answer the same actions differently" in detail


def test_actions_can_be_given() -> None:
    assert report_on(Foreign, policy=listed(["runter", "hoch"])).is_ok


def test_an_environment_that_ends_only_for_good_players_is_found() -> None:
    class Forever(Count):
        """`up` wins, `stay` does nothing, for ever."""

        def step(self, action: str) -> StepResult:
            if action == "stay" and self.count < self.goal:
                return self.outcome()
            return super().step(action)

    report = report_on(Forever, policy=lambda env, messages, rng: ["stay"] if len(messages) == 1 else ["up"])
    assert list(found(report, Verdict.FAILED)) == ["ends within bounded steps"]


def test_one_seed_is_too_few_to_compare() -> None:
    with pytest.raises(ValueError, match="two seeds"):
        check_env(Count, seeds=[1])


OPTIONS: dict[str, dict[str, Any]] = {
    "webshop": {"num_products": 50},
    "python_math": {"max_calls": 1},
    "retrieval_qa": {"num_people": 20},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, OPTIONS.get(kind, {})) for kind in ("frozen_lake", "sokoban", "webshop", "python_math", "retrieval_qa")]
    + [(kind, {"shown": "picture"}) for kind in ("frozen_lake", "sokoban")],
)
def test_a_bundled_environment_passes_every_check(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    node = TypeAdapter(EnvConfig).validate_python({"kind": kind, **options})
    report = check_env(lambda: make_env(node), seeds=range(2))
    assert not found(report, Verdict.FAILED)
    assert not found(report, Verdict.WARNING)
