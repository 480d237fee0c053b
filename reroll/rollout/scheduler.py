"""Prompts in, scored groups out: runs one coroutine per sample, as `Admission` decides."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

from reroll.config.parts import RolloutConfig
from reroll.errors import RerollError, RewardError, TooManyFailures
from reroll.observe.journal import QUEUED_AGAIN, Journal, RecordedSamples, SampleState
from reroll.observe.metrics import Last, Stats
from reroll.rollout.admission import Admission, AdmittedGroup, Queued, Snapshot, Supply
from reroll.rollout.in_flight import GroupInFlight
from reroll.rollout.meter import RecentFailures, RolloutMeter
from reroll.rollout.play import Episode, replayed, stable_seed
from reroll.types import Group, Prompt, Score, Status, Trajectory, Versions

ScoreOne = Callable[[Prompt, Trajectory], Awaitable[Score]]
"""(prompt, trajectory) -> score. A RewardError fails the sample; any other exception stops the run."""

_MAX_STEPS_DROPPED = 50
"""The run ends when this many steps' worth of groups were dropped in a row."""
_MIN_RECENT_SAMPLES = 16


_log = logging.getLogger(__name__)


class PromptStream(Supply[Prompt], Protocol):
    """An endless supply of prompts. It is told the rewards of its groups, and its state can be saved."""

    def record_rewards(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Called with the rewards of each group that was trained on or dropped."""

    def stats(self) -> Stats: ...

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class RolloutScheduler:
    """Keeps as many samples in flight as the staleness budget allows, and hands out finished groups, oldest first.

    Sampling starts with the first `take`. A sample is scored as soon as it ends; a group is ready when its last sample is.
    A failed sample is left out of its group. A group with too few samples, or without signal if the config asks for signal,
    is dropped, and another prompt of its domain takes its slot. The prompt stream is told a group's rewards when the group is
    dropped or has been trained on, so never of a group that a resumed run would sample again. Call all methods from one
    event loop.
    """

    def __init__(
        self,
        config: RolloutConfig,
        prompts: PromptStream,
        *,
        episode: Episode,
        score: ScoreOne,
        journal: Journal,
        seed: int,
        greedy: Episode | None = None,
    ) -> None:
        """With `greedy`, each group gets one more sample, played by it, whose reward is the group's baseline."""
        self._config = config
        self._prompts = prompts
        self._episode = episode
        self._greedy = greedy
        self._score = score
        self._journal = journal
        self._recorded: RecordedSamples | None = None
        """Samples that an interrupted run had finished."""
        self._kept: dict[int, dict[int, Trajectory]] = {}
        """Finished samples of groups that were sent back, by group number and sample index."""
        journal.partial.on_added = self._flush_soon
        self._seed = seed
        self._admission: Admission[Prompt] = Admission(
            prompts,
            prompts_per_step=config.prompts_per_step,
            max_staleness=config.max_staleness,
            oversample=config.oversample,
            long_rounds=config.long_rounds,
            take_window=config.take_window,
            max_tries=config.max_tries,
            max_drops=config.max_drops,
            kept_versions=self._kept_versions,
        )
        self._flights: dict[int, GroupInFlight] = {}
        """By group number: running, finished, or taken and not released."""
        self._stopping: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._meter = RolloutMeter(prompts.shares)
        self._recent = RecentFailures(max(_MIN_RECENT_SAMPLES, config.prompts_per_step * config.group_size))
        self._num_dropped_in_a_row = 0
        self._num_scoring = 0
        self._will_flush = False
        self._reassigning: set[str] = set()
        """Domains that lost slots of the step now awaited."""

    async def take(self, num_prompts: int) -> list[Group]:
        """Wait for the next step's groups: oldest first, all within the staleness budget. Release them before the next take.

        Raises what a sample raised, TooManyFailures if most samples fail, and RerollError if no group is ever kept.
        """
        return [group async for part in self.take_parts(num_prompts, early=False) for group in part]

    async def take_parts(self, num_prompts: int, *, early: bool = True) -> AsyncGenerator[list[Group]]:
        """As `take`, in parts: if `early`, each group as soon as it is certain to be in the step."""
        if num_prompts != self._config.prompts_per_step:
            raise ValueError(
                f"take rollout.prompts_per_step={self._config.prompts_per_step} prompts at a time, got {num_prompts}"
            )
        while True:
            if self._error is not None:
                raise self._error
            self._admit()
            if taken := self._admission.take():
                break
            if early and (promised := self._admission.promise()):
                yield self._handed_out(promised)
                continue
            self._wake.clear()
            await self._wake.wait()
        self._stop(taken.returned, QUEUED_AGAIN)
        self._reassigning.clear()
        last = self._handed_out([admitted for admitted in taken.groups if not admitted.is_promised])
        self._admit()
        self._journal.taken([admitted.number for admitted in taken.groups])
        yield last

    def _handed_out(self, admitted_groups: Sequence[AdmittedGroup[Prompt]]) -> list[Group]:
        now = self._loop.time()
        for admitted in admitted_groups:
            self._meter.ready_s.add(now - self._flights[admitted.number].finished_s)
            self._meter.staleness.add(self._admission.version - admitted.version)
        return [self._flights[admitted.number].group() for admitted in admitted_groups]

    def progress(self) -> str:
        """Progress of the samples that the next `take` waits for, in words."""
        num_wanted = self._config.prompts_per_step * self._config.group_size
        num_ended = sum(len(flight.trajectories) - flight.num_left for flight in self._flights.values())
        scoring = f", {self._num_scoring} being scored" if self._num_scoring else ""
        return f"generating: {min(num_ended, num_wanted)}/{num_wanted} samples have ended{scoring}"

    def release(self, groups: Sequence[Group], *, version: int) -> None:
        """Call after these groups were trained on and weights of `version` were pushed. Their slots free only now, or new
        samples would be stale from the start."""
        outdated = self._admission.release([group.number for group in groups], version=version)
        if self._recorded is not None:
            rewards = {group.number: self._flights[group.number].rewards() for group in groups}
            if not self._recorded.stepped(version, rewards):
                self._journal.partial.forget_lost(version, in_flight=self._flights)
        for group in groups:
            self._record(self._flights.pop(group.number), SampleState.TRAINED, version=version)
            self._meter.trained_groups[group.prompt.domain] += 1
            self._prompts.record_rewards(group.prompt, group.rewards)
        self._stop(outdated, QUEUED_AGAIN)
        self._journal.partial.forget_older(version - self._config.max_staleness)
        self._admit()
        self._journal.stepped(version=version)  # The groups must be marked before a checkpoint of this step.

    def stats(self) -> Stats:
        """Metrics since the last call."""
        meter, self._meter = self._meter, RolloutMeter(self._prompts.shares)
        deferred = {"rollout/deferred_groups": Last(self._admission.num_deferred)} if self._config.long_rounds else {}
        return meter.stats() + self._prompts.stats() + Stats(deferred)

    def state(self) -> dict[str, Any]:
        """State to resume from, as JSON: no prompt is lost or trained on twice. Read it after `release`, or after `close`."""
        snapshot = self._admission.snapshot()
        return {
            "prompts": self._prompts.state(),
            "version": snapshot.version,
            "num_issued": snapshot.num_issued,
            "places": snapshot.slot_domains,
            "num_dropped": snapshot.num_dropped,
            "num_ceded_to": snapshot.num_reassigned_to,
            "queue": [
                {"number": one.number, "num_tries": one.num_tries, "level": one.level, "prompt": _to_plain(one.prompt)}
                for one in snapshot.queue
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`; call before the first take. Of the groups in flight, finished samples come from the journal;
        the others continue after their last token in it, with the same seeds."""
        self._prompts.restore(state["prompts"])
        self.take_up(version=state["version"])
        self._admission.restore(
            Snapshot(
                version=state["version"],
                num_issued=state["num_issued"],
                queue=[_queued(row) for row in state["queue"]],
                slot_domains=state["places"],
                # Earlier versions did not count these.
                num_dropped=state.get("num_dropped", {}),
                num_reassigned_to=state.get("num_ceded_to", dict.fromkeys(state["num_issued"], 0)),
            )
        )

    def take_up(self, *, version: int) -> None:
        """Reuse from the journal what an interrupted run sampled since this weight version. `restore` calls it; call it to
        continue a run that has no checkpoint yet."""
        self._recorded = self._journal.resume(version=version, max_staleness=self._config.max_staleness)

    async def close(self) -> None:
        """Cancel all samples and wait for their clean-up. Safe to call twice."""
        self._break(RerollError("the rollout scheduler is closed"))
        self._stop([flight.admitted for flight in self._flights.values()], "closed")
        await asyncio.gather(*self._stopping, return_exceptions=True)
        self._journal.flush()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        # Its clock is virtual in a simulation. Asking for it is a system call in Python 3.11.
        return asyncio.get_running_loop()

    def _admit(self) -> None:
        if self._error is not None:
            return
        now = self._loop.time()
        has_baseline = self._greedy is not None
        for admitted in self._admission.admit():
            group_size = self._config.of(admitted.domain).group_size
            num_samples = group_size + self._config.extra_samples + has_baseline
            flight = GroupInFlight(admitted, now, [None] * num_samples, num_samples, group_size, has_baseline=has_baseline)
            self._flights[admitted.number] = flight
            about: dict[str, Any] = {"prompt": admitted.prompt.id, "domain": admitted.domain, "version": admitted.version}
            about |= _for_readers(admitted.prompt)
            self._record(flight, SampleState.QUEUED, **about | ({"baseline": num_samples - 1} if has_baseline else {}))
            flight.tasks = [self._loop.create_task(self._run_sample(flight, index)) for index in range(num_samples)]

    async def _run_sample(self, flight: GroupInFlight, index: int) -> None:
        try:
            trajectory = await self._generate_and_score(flight, index)
            if not flight.is_stopped and flight.trajectories[index] is None:
                self._end_sample(flight, index, trajectory)
        except asyncio.CancelledError:
            if not flight.is_stopped and flight.trajectories[index] is None:
                self._break(RerollError(f"sample {flight.sample_id(index)} was cancelled from outside: is its engine closed?"))
            raise
        except Exception as error:  # A bug or a dead worker: `take` raises it, as nobody awaits this task.
            self._break(error)

    async def _generate_and_score(self, flight: GroupInFlight, index: int) -> Trajectory:
        """Play one sample's episode and score it."""
        admitted = flight.admitted
        id = flight.sample_id(index)
        if (recalled := self._recall(admitted, index)) is not None:
            self._meter.num_recalled += 1
            return recalled
        started_s = self._loop.time()
        self._meter.queue_s.add(started_s - flight.admitted_s)
        num_kept = self._take_up_tokens(admitted, id)
        self._journal.record(id, SampleState.GENERATING, **({"kept": num_kept} if num_kept else {}))
        is_baseline = self._greedy is not None and index == len(flight.trajectories) - 1
        episode = self._greedy if self._greedy and is_baseline else self._episode
        seed = stable_seed(self._seed, admitted.number, index)
        trajectory = await replayed(episode, admitted.prompt, id, seed, on_lost=partial(self._note_lost, id))
        generated_s = self._loop.time()
        self._meter.generate_s.add(generated_s - started_s)
        if flight.is_stopped or not trajectory.is_usable:
            return trajectory
        self._journal.record(id, SampleState.SCORING, tokens=trajectory.num_completion_tokens)
        self._num_scoring += 1
        try:
            score = await self._score(admitted.prompt, trajectory)
        except RewardError as error:
            return replace(trajectory, status=Status.FAILED, reason=str(error))
        finally:
            self._num_scoring -= 1
        self._meter.score_s.add(self._loop.time() - generated_s)
        if not math.isfinite(score.value):
            return replace(trajectory, status=Status.FAILED, reason=f"its reward is {score.value}")
        return trajectory.scored(score)

    def _recall(self, admitted: AdmittedGroup[Prompt], index: int) -> Trajectory | None:
        """The sample, if it had ended when its group was sent back or the run was interrupted; else None."""
        kept = self._kept.get(admitted.number, {}).pop(index, None)
        if kept is not None:
            if self._fits(admitted, kept.versions):
                return kept
            reason = _misfit(admitted, kept.versions)
            self._note_discarded(f"{admitted.number}.{index}", kept.num_completion_tokens, reason)
        if self._recorded is None:
            return None
        fits = partial(self._fits, admitted)
        return self._recorded.take(admitted.number, admitted.prompt.id, index=index, fits=fits)

    def _take_up_tokens(self, admitted: AdmittedGroup[Prompt], id: str) -> int:
        """How many kept tokens the sample continues from. They are dropped if they come from unfit weight versions."""
        tokens = self._journal.partial
        if (versions := tokens.versions(id)) is None:
            return 0
        num_tokens = tokens.num_tokens(id)
        if not self._fits(admitted, versions):
            tokens.forget(id)
            self._note_discarded(id, num_tokens, _misfit(admitted, versions))
            return 0
        self._meter.num_continued_tokens += num_tokens
        return num_tokens

    def _note_discarded(self, id: str, num_tokens: int, reason: str) -> None:
        self._meter.num_discarded_tokens += num_tokens
        self._journal.record(id, SampleState.GENERATING, discarded=num_tokens, reason=reason)

    def _fits(self, admitted: AdmittedGroup[Prompt], versions: Versions) -> bool:
        """Whether a sample of this group may hold tokens of these weight versions: none older than the group, none lost in an
        interruption."""
        return admitted.version <= versions.oldest and versions.newest <= self._admission.version

    def _kept_versions(self, number: int, prompt: Prompt) -> list[int]:
        """The oldest weight version of each kept sample of a group, finished or not."""
        found = self._journal.partial.versions_in_group(number)
        if self._recorded is not None:
            found += self._recorded.versions(number, prompt.id)
        ended = self._flights[number].ended_samples() if number in self._flights else self._kept.get(number, {})
        found += [trajectory.versions for trajectory in ended.values()]
        return [versions.oldest for versions in found if versions.newest <= self._admission.version]

    def _note_lost(self, id: str, reason: str) -> None:
        """Record that a sample's environment was lost with its process, so that the episode is played again."""
        self._meter.num_replays += 1
        self._journal.record(id, SampleState.GENERATING, reason=reason)

    def _end_sample(self, flight: GroupInFlight, index: int, trajectory: Trajectory) -> None:
        id = flight.sample_id(index)
        flight.trajectories[index] = trajectory
        flight.num_left -= 1
        if trajectory.is_usable:
            if not (flight.has_baseline and index == len(flight.trajectories) - 1):
                flight.ended.append(index)
            self._recent.add(None)
            self._journal.ended(id, trajectory)
            self._flush_soon()
        else:
            reason = trajectory.reason or f"it ended as {trajectory.status} with nothing written"
            self._recent.add(reason)
            self._meter.ends[SampleState.FAILED] += 1
            self._journal.record(id, SampleState.FAILED, reason=reason)
            self._journal.partial.forget(id)
            if self._recent.exceed(self._config.max_failed_fraction):
                self._break(TooManyFailures(f"{self._recent.describe()}\nThe limit is rollout.max_failed_fraction."))
        if flight.num_left and flight.has_enough:
            self._abort_slowest(flight)
        if flight.num_left == 0:
            self._end_group(flight)

    def _flush_soon(self) -> None:
        """Flush the journal in the next iteration of the event loop: samples that end together are written together."""
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        try:
            self._journal.flush()
        except Exception as error:  # A full disk, or a value that JSON cannot express: nobody awaits this.
            self._break(error)

    def _abort_slowest(self, flight: GroupInFlight) -> None:
        """Abort the samples that still run: the group has enough without them."""
        for index, trajectory in enumerate(flight.trajectories):
            if trajectory is None:
                reason = "its group was whole without it"
                flight.trajectories[index] = Trajectory(
                    id=flight.sample_id(index), turns=(), status=Status.ABORTED, reason=reason
                )
                flight.num_left -= 1
                self._journal.record(flight.sample_id(index), SampleState.ABORTED, reason=reason)
                self._journal.partial.forget(flight.sample_id(index))
                self._meter.ends[SampleState.ABORTED] += 1
                self._cancel(flight.tasks[index])

    def _end_group(self, flight: GroupInFlight) -> None:
        group = flight.group()
        if self._config.extra_samples:
            self._meter.order.add([trajectory for index in flight.ended if (trajectory := flight.trajectories[index])])
        # A group baseline needs a sibling.
        if len(group.trajectories) < min(2, flight.group_size):
            self._drop(flight, "too few siblings are usable")
        elif flight.has_baseline and group.baseline is None:
            self._drop(flight, "its greedy sample failed")
        elif self._config.drop_zero_variance_groups and not group.has_signal:
            self._drop(flight, "all rewards of the group are equal")
        else:
            self._num_dropped_in_a_row = 0
            flight.finished_s = self._loop.time()
            flight.tasks.clear()
            self._admission.finish(flight.admitted, keep=True)
            self._wake.set()

    def _drop(self, flight: GroupInFlight, reason: str) -> None:
        del self._flights[flight.admitted.number]
        self._record(flight, SampleState.FILTERED, reason=reason)
        self._prompts.record_rewards(flight.admitted.prompt, flight.group().rewards)
        self._meter.dropped_groups[flight.admitted.domain] += 1
        if self._admission.finish(flight.admitted, keep=False) is not None:
            self._note_reassigned(flight.admitted.domain, reason)
        self._num_dropped_in_a_row += 1
        if self._num_dropped_in_a_row >= _MAX_STEPS_DROPPED * self._config.prompts_per_step:
            self._break(self._nothing_is_kept(reason))
        self._admit()

    def _note_reassigned(self, domain: str, reason: str) -> None:
        self._meter.ceded_groups[domain] += 1
        if domain not in self._reassigning:
            self._reassigning.add(domain)
            _log.warning(
                "domain %s loses slots of this step to the others: it dropped more than rollout.max_drops=%d groups for "
                "each that it owes, the last because %s",
                domain,
                self._config.max_drops,
                reason,
            )

    def _nothing_is_kept(self, reason: str) -> RerollError:
        dropped = f"{self._num_dropped_in_a_row} groups in a row were dropped, the last because {reason}"
        if self._recent.num_failed:
            return TooManyFailures(f"{dropped}. {self._recent.describe()}")
        return RerollError(
            f"{dropped}: the task is far too easy or too hard for this model. "
            "Change the data or the rewards, or set rollout.drop_zero_variance_groups to false"
        )

    def _stop(self, groups: Sequence[AdmittedGroup[Prompt]], reason: str) -> None:
        """Cancel these groups' running samples."""
        for admitted in groups:
            flight = self._flights.pop(admitted.number)
            flight.is_stopped = True
            if admitted.goes_on:
                self._kept[admitted.number] = flight.ended_samples()
            elif reason == QUEUED_AGAIN:
                self._discard(flight)
            self._record(flight, SampleState.ABORTED, reason=reason)
            for task in flight.tasks:
                self._cancel(task)

    def _discard(self, flight: GroupInFlight) -> None:
        """Drop the samples of a group that was sent back: they are too old to continue."""
        ended = flight.ended_samples()
        for index in range(len(flight.trajectories)):
            id = flight.sample_id(index)
            num_tokens = ended[index].num_completion_tokens if index in ended else self._journal.partial.num_tokens(id)
            self._journal.partial.forget(id)
            if num_tokens:
                self._note_discarded(id, num_tokens, "its group was sent back, and no sample of it is fresh enough to go on")

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if task.cancel():
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    def _record(self, flight: GroupInFlight, state: SampleState, **detail: Any) -> None:
        """Record one event for every sample of the group that has not failed."""
        samples = flight.whole()
        self._journal.record_group(flight.admitted.number, samples, state, **detail)
        if state is not SampleState.QUEUED:
            self._meter.ends[state] += len(samples)

    def _break(self, error: Exception) -> None:
        """Stop admission and have `take` raise. The first error is the cause; later ones follow from it."""
        if self._error is None:
            self._error = error
        self._wake.set()


def _misfit(admitted: AdmittedGroup[Prompt], versions: Versions) -> str:
    return f"written under weights {versions.oldest} to {versions.newest}, and its group is of {admitted.version}"


def _for_readers(prompt: Prompt) -> dict[str, Any]:
    """What a reader of the journal needs of a prompt beside its messages: reference answer and seed."""
    seed = prompt.extra.get("seed")
    answer = {} if prompt.answer is None else {"answer": prompt.answer}
    return answer | ({"seed": seed} if isinstance(seed, int) else {})


def _to_plain(prompt: Prompt) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "messages": [dict(message) for message in prompt.messages],
        "domain": prompt.domain,
        "answer": prompt.answer,
        "extra": dict(prompt.extra),
    }


def _queued(row: dict[str, Any]) -> Queued[Prompt]:
    plain = row["prompt"]
    prompt = Prompt(**{**plain, "messages": tuple(plain["messages"])})
    level = row.get("level", 0)  # Earlier versions deferred nothing.
    return Queued(prompt=prompt, domain=prompt.domain, num_tries=row["num_tries"], number=row["number"], level=level)
