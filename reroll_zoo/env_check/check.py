"""Plays an environment through and through, and says what training would stumble over."""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, islice
from typing import Any

from reroll.envs.base import Env, InvalidAction, StepResult
from reroll.envs.checked import as_messages, as_step_result
from reroll.errors import RerollError, short_error
from reroll.types import Message

MAX_STEPS = 1000
"""An episode that is not over by then does not end."""
MAX_TRIES = 200
"""Words that are tried until one of them is an action."""
LONG_CHARS = 20_000
"""Longer messages are cut by default."""
NO_ACTION = "¿no such action?"
ROLES = ("system", "user", "assistant", "tool")

Policy = Callable[[Env, Sequence[Message], random.Random], Iterable[str]]
"""What to try next, best first: the first that is an action is taken. It sees the environment and all messages so far."""


class Verdict(StrEnum):
    """How a check went."""

    PASSED = "passed"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One property of an environment."""

    name: str
    verdict: Verdict
    detail: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was checked."""

    checks: tuple[Check, ...]

    @property
    def is_ok(self) -> bool:
        """Whether nothing failed; warnings are allowed."""
        return all(check.verdict is not Verdict.FAILED for check in self.checks)


def check_env(make: Callable[[], Env], *, seeds: Sequence[int], policy: Policy | None = None) -> Report:
    """Play the instance of every seed, several times, and check what came of it. `make` builds a new environment each time.

    At least two seeds. Without a policy, actions come from `solve()` if the environment has it, else from its messages.
    """
    if len(set(seeds)) < 2:
        raise ValueError(f"two seeds are compared at least, got {list(seeds)}: give more")
    with asyncio.Runner() as runner:
        return _Checker(make, list(seeds), policy or solver_or_words, runner).report()


def listed(actions: Sequence[str]) -> Policy:
    """A policy that knows these actions, and takes them in any order."""
    return lambda env, messages, rng: rng.sample(list(actions), len(actions))


def solver_or_words(env: Env, messages: Sequence[Message], rng: random.Random) -> Iterator[str]:
    """The next action of the environment's own solution, if it has one; then what its messages mention, newest first."""
    solve = getattr(env, "solve", None)
    if solve is not None:
        yield from solve()[:1]
    for message in reversed(messages):
        words = list(dict.fromkeys(re.findall(r"\w+\[[^\]\n]+\]|\w+", message["content"])))
        yield from rng.sample(words, len(words))


class _Stop(Exception):
    """The environment cannot be played on. The message says why."""


@dataclass(slots=True)
class _Episode:
    """What happened in one episode."""

    seed: int
    first: tuple[Message, ...] = ()
    actions: list[str] = field(default_factory=list)
    outcomes: list[StepResult] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.outcomes) and (self.outcomes[-1].terminated or self.outcomes[-1].truncated)

    @property
    def messages(self) -> list[Message]:
        return [*self.first, *(message for outcome in self.outcomes for message in outcome.messages)]


class _Checker:
    """The checks, in order. A check that cannot go on raises _Stop or what the environment raised; the others still run."""

    def __init__(self, make: Callable[[], Env], seeds: list[int], policy: Policy, runner: asyncio.Runner) -> None:
        self._make = make
        self._seeds = seeds
        self._policy = policy
        self._runner = runner
        self._checks: list[Check] = []
        self._episodes: list[_Episode] = []
        self._reset_s: list[float] = []
        self._step_s: list[float] = []

    def report(self) -> Report:
        with self._checking("plays", "mend what it raises or returns; give actions that it takes with --action"):
            self._episodes = [self._played(seed) for seed in self._seeds]
            self._pass("plays", f"{len(self._seeds)} episodes, {sum(len(e.actions) for e in self._episodes)} steps")
        if self._episodes:
            self._check_messages()
            self._check_rewards()
            self._check_end()
            self._check_determinism()
            self._check_side_by_side()
            self._check_seeds_differ()
            self._check_invalid_action()
            self._check_after_end()
        self._check_close()
        self._tell_latency()
        return Report(tuple(self._checks))

    def _check_messages(self) -> None:
        name, fix = "messages are well-formed", f"use the roles {', '.join(ROLES)} and say something in every message"
        messages = [message for episode in self._episodes for message in episode.messages]
        bad = [message for message in messages if message["role"] not in ROLES or not message["content"].strip()]
        longest = max(len(message["content"]) for message in messages)
        if bad:
            self._fail(name, f"{len(bad)} have an unknown role or no content, e.g. {str(bad[0])[:80]}", fix)
        elif longest > LONG_CHARS:
            self._warn(name, f"the longest has {longest:,} characters", f"keep them below {LONG_CHARS:,}: longer ones are cut")
        else:
            self._pass(name, f"at most {longest:,} characters")

    def _check_rewards(self) -> None:
        rewards = [outcome.reward for episode in self._episodes for outcome in episode.outcomes]
        totals = [sum(outcome.reward for outcome in episode.outcomes) for episode in self._episodes]
        detail = f"steps {min(rewards):g} to {max(rewards):g}, episodes {min(totals):g} to {max(totals):g}"
        if max(totals) == min(totals) == 0:
            self._warn("rewards are finite", "no episode earned anything", "give actions that earn something with --action")
        else:
            self._pass("rewards are finite", detail)

    def _check_end(self) -> None:
        """Also for a policy that never gets anywhere: it takes the first action it finds, again and again."""
        name = "ends within bounded steps"
        with self._checking(name, "count steps, and set truncated at a limit"):
            stubborn = self._played(self._seeds[0], stubborn=True)
            self._pass(name, f"at most {max(len(episode.actions) for episode in (*self._episodes, stubborn))}")

    def _check_determinism(self) -> None:
        name = "equal seeds and actions give equal episodes"
        fix = "draw from random.Random(seed) made in reset; no global generator, clock, hash() or set order"
        with self._checking(name, fix):
            for episode in self._episodes:
                self._compare(episode, self._replayed(episode))
            self._pass(name)

    def _check_side_by_side(self) -> None:
        name = "episodes side by side do not disturb each other"
        with self._checking(name, "keep state in the instance, not in the class or the module, and use no global generator"):
            one, other = self._episodes[0], self._episodes[1]
            with self._opened() as first, self._opened() as second:
                again = [
                    _Episode(one.seed, self._reset(first, one.seed)),
                    _Episode(other.seed, self._reset(second, other.seed)),
                ]
                for index in range(max(len(one.actions), len(other.actions))):
                    for env, model, copy in ((first, one, again[0]), (second, other, again[1])):
                        if index < len(model.actions):
                            copy.outcomes.append(self._step(env, model.actions[index]))
                self._compare(one, again[0])
                self._compare(other, again[1])
            self._pass(name)

    def _check_seeds_differ(self) -> None:
        name = "different seeds give different instances"
        num_different = len({str(episode.first) for episode in self._episodes})
        if num_different > 1:
            self._pass(name, f"{num_different} of {len(self._seeds)} begin differently")
        elif self._answer_differently():
            self._pass(name, "they begin alike, and answer the same actions differently")
        else:
            detail = f"all {len(self._seeds)} begin alike, and answer the same actions alike"
            self._warn(name, detail, "draw the instance from the seed, or all episodes train on one task")

    def _answer_differently(self) -> bool:
        """Whether some seeds give another answer to the actions of the first one: what is drawn need not be shown at first."""
        actions, answers = self._episodes[0].actions, set()
        for seed in self._seeds:
            with self._opened() as env:
                self._reset(env, seed)
                answers.add(str(self._answers(env, actions)))
        return len(answers) > 1

    def _answers(self, env: Env, actions: Sequence[str]) -> list[StepResult | str]:
        """What comes of these actions, until the episode is over or an action is none."""
        answers: list[StepResult | str] = []
        for action in actions:
            try:
                answers.append(outcome := self._step(env, action))
            except InvalidAction as error:
                return [*answers, str(error)]
            if outcome.terminated or outcome.truncated:
                break
        return answers

    def _check_invalid_action(self) -> None:
        name = "an invalid action leaves the state unchanged"
        fix = "raise InvalidAction, which tells the policy what would be an action, before anything changes"
        with self._checking(name, fix):
            episode = self._episodes[0]
            with self._opened() as env:
                again = _Episode(episode.seed, self._reset(env, episode.seed))
                for action in episode.actions:
                    try:
                        self._step(env, NO_ACTION)
                    except InvalidAction as error:
                        if not str(error):
                            raise _Stop(
                                "InvalidAction has no message: the policy is not told what would be an action"
                            ) from None
                    else:
                        self._add(name, Verdict.SKIPPED, "it takes any words as an action")
                        return
                    again.outcomes.append(self._step(env, action))
                self._compare(episode, again)
            self._pass(name)

    def _check_after_end(self) -> None:
        name = "a step after the end is an error or harmless"
        episode = self._episodes[0]
        with self._checking(name, "raise EnvError, or answer with the same end and no reward"):
            with self._opened() as env:
                self._reset(env, episode.seed)
                for action in episode.actions:
                    self._step(env, action)
                try:
                    outcome = self._step(env, episode.actions[-1])
                except (Exception, SystemExit):
                    self._pass(name, "an error")
                    return
            if outcome.reward or not (outcome.terminated or outcome.truncated):
                raise _Stop(f"it goes on, with reward {outcome.reward:g}")
            self._pass(name, "harmless")

    def _check_close(self) -> None:
        name = "close may be called twice, and before reset"
        with self._checking(name, "let close free what there is, and do nothing where there is nothing"):
            env = self._make()
            self._settled(env.close())  # type: ignore[func-returns-value]
            env = self._make()
            self._reset(env, self._seeds[0])
            for _ in range(2):
                self._settled(env.close())  # type: ignore[func-returns-value]
            self._pass(name)

    def _tell_latency(self) -> None:
        for what, seconds in (("reset", self._reset_s), ("step", self._step_s)):
            if seconds:
                mean, most = 1000 * sum(seconds) / len(seconds), 1000 * max(seconds)
                self._pass(f"latency of {what}", f"{mean:.3g} ms on average, at most {most:.3g} ms")

    def _played(self, seed: int, *, stubborn: bool = False) -> _Episode:
        """An episode to its end, as the policy plays it."""
        rng = random.Random(seed)
        with self._opened() as env:
            episode = _Episode(seed, self._reset(env, seed))
            while not episode.is_over:
                if len(episode.actions) == MAX_STEPS:
                    raise _Stop(f"an episode was not over after {MAX_STEPS} steps")
                favourites = episode.actions[-1:] if stubborn else []
                self._act(env, episode, chain(favourites, self._policy(env, episode.messages, rng)))
            return episode

    def _act(self, env: Env, episode: _Episode, candidates: Iterable[str]) -> None:
        for action in islice(candidates, MAX_TRIES):
            try:
                outcome = self._step(env, action)
            except InvalidAction:
                continue
            episode.actions.append(action)
            episode.outcomes.append(outcome)
            return
        raise _Stop("no action was found among the words of its messages: give some with --action")

    def _replayed(self, episode: _Episode) -> _Episode:
        with self._opened() as env:
            return _Episode(
                episode.seed, self._reset(env, episode.seed), episode.actions, [self._step(env, a) for a in episode.actions]
            )

    def _compare(self, one: _Episode, other: _Episode) -> None:
        if one.first != other.first:
            raise _Stop(f"seed {one.seed}: reset showed something else")
        for index, (before, now) in enumerate(zip(one.outcomes, other.outcomes, strict=True)):
            for part in ("messages", "reward", "terminated", "truncated", "info", "state"):
                if getattr(before, part) != getattr(now, part):
                    raise _Stop(f"seed {one.seed}, step {index + 1} ({one.actions[index]!r}): {part} changed")

    def _reset(self, env: Env, seed: int) -> tuple[Message, ...]:
        start_s = time.perf_counter()
        value = self._settled(env.reset(seed))
        self._reset_s.append(time.perf_counter() - start_s)
        return as_messages(value, max_chars=10**9)

    def _step(self, env: Env, action: str) -> StepResult:
        start_s = time.perf_counter()
        value = self._settled(env.step(action))
        self._step_s.append(time.perf_counter() - start_s)
        return as_step_result(value, max_chars=10**9)

    def _settled(self, value: Any) -> Any:
        return self._runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    @contextmanager
    def _opened(self) -> Iterator[Env]:
        env = self._make()
        try:
            yield env
        finally:
            self._settled(env.close())  # type: ignore[func-returns-value]

    @contextmanager
    def _checking(self, name: str, fix: str) -> Iterator[None]:
        """A check fails by what is raised inside."""
        try:
            yield
        except (_Stop, RerollError) as error:
            self._fail(name, str(error), fix)
        except (Exception, SystemExit) as error:
            self._fail(name, f"raised {short_error(error)}", fix)

    def _pass(self, name: str, detail: str = "") -> None:
        self._add(name, Verdict.PASSED, detail)

    def _warn(self, name: str, detail: str, fix: str) -> None:
        self._add(name, Verdict.WARNING, detail, fix)

    def _fail(self, name: str, detail: str, fix: str) -> None:
        self._add(name, Verdict.FAILED, detail, fix)

    def _add(self, name: str, verdict: Verdict, detail: str = "", fix: str = "") -> None:
        self._checks.append(Check(name, verdict, detail, fix))


async def _awaited(value: Any) -> Any:
    return await value
