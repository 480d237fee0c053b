"""What a run's journal proves: every group's fate, none trained twice, none lost, none too stale, every token accounted for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from reroll.observe.journal import (
    BEGUN,
    CONTINUED,
    QUEUED_AGAIN,
    STEPPED,
    Event,
    SampleState,
    open_events,
    parse_line,
    read_events,
    read_journal,
    read_stored,
    segments,
)

MAX_TOLD = 20
"""Violations of one kind that are told in full."""


@dataclass(slots=True)
class Audit:
    """What was found."""

    num_lives: int = 0
    """How often the run was started or resumed."""
    num_steps: int = 0
    num_cut_steps: int = 0
    """Of these so many have lost events: the oldest were deleted to keep within `run.journal_gib`."""
    trained: int = 0
    """Groups, as are the next four."""
    dropped: int = 0
    sent_back: int = 0
    """Too old, or more than a step needed: their prompts were queued again."""
    in_flight: int = 0
    """Admitted, and neither trained on nor dropped when the journal ends."""
    undone: int = 0
    """Trained after the last checkpoint before an interruption, and so trained again."""
    num_samples: int = 0
    """Trained on."""
    num_tokens: int = 0
    """Written by those whose tokens are kept."""
    num_unkept: int = 0
    """Samples whose tokens were deleted to keep within `run.journal_gib`."""
    num_continued_tokens: int = 0
    """Written before an interruption, or before a group was sent back: samples that had not ended went on after them."""
    num_discarded_tokens: int = 0
    """Written before, and drawn anew for a reason that the journal gives."""
    staleness: int = 0
    """The largest."""
    num_metric_rows: int = 0
    """Steps of which the metrics were compared with what their samples give."""
    num_metric_values: int = 0
    violations: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _OpenGroup:
    """Admitted, and neither trained on nor dropped so far."""

    prompt: str
    domain: str
    version: int
    queued: set[int] = field(default_factory=set)
    """Indices of its samples, as are the next two."""
    ended: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    continued: dict[int, int] = field(default_factory=dict)
    """By a sample's index, the tokens that it went on after."""


@dataclass(slots=True)
class _WaitingGroup:
    """Sent back, or open when the run was interrupted: its prompt is queued in front of those that were never admitted."""

    prompt: str
    since: str
    """What happened to it, in words."""
    interrupted_at: int | None = None
    """The version that the run went on from, if it was open then: it is among the first that are admitted."""
    is_overtaken: bool = False
    """A prompt that was never admitted came before it. One that may wait for its round is told from one that is lost by the
    next checkpoint, which has it in its queue."""


def audit(
    folder: Path,
    *,
    max_staleness: int,
    num_domains: int | None = None,
    owed: Mapping[int, Set[int]] | None = None,
    defers: bool = False,
    on_segment: Callable[[], None] = lambda: None,
) -> Audit:
    """Read a journal from end to end. `on_segment` is called after each of its files.

    `num_domains`: of the prompts; None: those that were seen. `owed`: for versions of which there is a checkpoint, the numbers
    of the groups that a run which goes on from it has to admit again. `defers`: with `rollout.long_rounds`, groups that were
    sent back may wait while others are drawn; then checkpoints alone tell whether one was forgotten.
    """
    events = counted_events(folder)
    found = events.found
    reader = _Auditor(found, max_staleness, num_domains, owed or {}, defers=defers, begins_at=events.begins_at)
    for segment, kept in events.by_segment():
        for event in kept:
            reader.take(event)
        if damage := damage_of(segment):
            found.violations.append(damage)
        on_segment()
    reader.finish()
    return found


class CountedEvents:
    """The events of a journal that no interruption undid, oldest first. Where the oldest were deleted, what is told of groups
    that were admitted then is left out, too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undone: list[tuple[int, int]] = []
        """Ranges of events."""
        self.begins_at: int | None = None
        """The step in which the journal begins; None: it is whole."""
        self.found = Audit()
        self._look()

    def __iter__(self) -> Iterator[Event]:
        for _, kept in self.by_segment():
            yield from kept

    def by_segment(self) -> Iterator[tuple[Path, Iterator[Event]]]:
        """Each file with those of its events that count."""
        numbers, known = count(), set[int]()
        for segment in segments(self._folder):
            yield segment, self._kept(segment, numbers, known)

    def _kept(self, segment: Path, numbers: Iterator[int], known: set[int]) -> Iterator[Event]:
        for event, number in zip(read_events(segment), numbers, strict=False):
            is_undone = any(start <= number < end for start, end in self._undone)
            if not is_undone and (self.begins_at is None or _is_known(event, known)):
                yield event

    def _look(self) -> None:
        """Through all, once, before they are read."""
        after_step: dict[int, int] = {}
        found, trained_since, known, is_cut = self.found, Counter[int](), set[int](), False
        for number, event in enumerate(read_journal(self._folder)):
            if number == 0 and event.state == CONTINUED:
                found.num_lives, is_cut, self.begins_at = 1, True, event.detail["version"]
            if self.begins_at is not None and not _is_known(event, known):
                is_cut = True
            if event.state == BEGUN:
                version = event.detail["version"]
                start = after_step.get(version, 0)
                if found.num_lives and version and version not in after_step:
                    found.violations.append(
                        f"out of order: the run went on from step {version}, of which the journal knows nothing"
                    )
                if found.num_lives and start < number:
                    self._undone.append((start, number))
                found.undone += sum(num for later, num in trained_since.items() if later > version)
                after_step = {step: place for step, place in after_step.items() if step <= version}
                trained_since = Counter({later: num for later, num in trained_since.items() if later <= version})
                found.num_lives += 1
            elif event.state == STEPPED:
                version = event.detail["version"]
                if is_cut:
                    self.begins_at = version - 1 if not found.num_cut_steps else self.begins_at
                    found.num_cut_steps, is_cut = version, False
                after_step[version] = number + 1
            elif event.state == SampleState.TRAINED and event.index == 0:
                trained_since[event.detail["version"]] += 1


def counted_events(folder: Path) -> CountedEvents:
    """The events that no interruption undid, oldest first."""
    return CountedEvents(folder)


def _is_known(event: Event, known: set[int]) -> bool:
    """Whether it is of a group whose admission came before, or of none. `known` is told of admissions."""
    if event.state == SampleState.QUEUED:
        known.add(event.group)
    return not event.sample_id or event.group in known


class _Auditor:
    """Goes through the events that count, with no more in memory than the groups that are open and the numbers of all."""

    def __init__(
        self,
        found: Audit,
        max_staleness: int,
        num_domains: int | None,
        owed: Mapping[int, Set[int]],
        *,
        defers: bool,
        begins_at: int | None,
    ) -> None:
        self._found = found
        self._defers = defers
        self._max_staleness = max_staleness
        self._num_domains = num_domains
        self._owed = owed
        self._open: dict[int, _OpenGroup] = {}
        self._waiting: defaultdict[str, dict[int, _WaitingGroup]] = defaultdict(dict)
        """By domain and number."""
        self._numbers: defaultdict[str, set[int]] = defaultdict(set)
        """Of all groups that were ever admitted, by domain."""
        self._trained: dict[int, int] = {}
        """Numbers of groups, and the version that each was trained into."""
        self._in_this_step: set[int] = set()
        """Trained, and its weights not yet with the engines."""
        self._version = begins_at or 0
        self._is_whole: bool | None = None if begins_at is None else False
        """The journal begins with the run. What came before one that was deleted is not known. None: not begun."""
        self._told: Counter[str] = Counter()

    def take(self, event: Event) -> None:
        match event.state:
            case SampleState.QUEUED:
                self._queued(event)
            case SampleState.GENERATING:
                self._generating(event)
            case SampleState.DONE:
                self._done(event)
            case SampleState.FAILED:
                self._failed(event)
            case SampleState.TRAINED:
                self._was_trained(event)
            case SampleState.FILTERED:
                self._dropped(event.group)
            case SampleState.ABORTED if event.detail.get("reason") == QUEUED_AGAIN:
                self._sent_back(event.group)
            case _ if event.state == BEGUN:
                self._begun(event.detail["version"])
            case _ if event.state == STEPPED:
                self._stepped(event.detail["version"])

    def finish(self) -> None:
        """What is left when the journal ends."""
        for number, group in self._open.items():
            # `Admission.release` has sent back whatever is older, before the step was over.
            if self._version - group.version > self._max_staleness:
                self._violation(
                    "lost",
                    f"group {number} ({group.prompt}) was admitted at step {group.version}, and neither trained on, dropped "
                    f"nor sent back by step {self._version}",
                )
        for queue in self._waiting.values():
            for number, waiting in queue.items():
                if not self._defers and (waiting.is_overtaken or self._is_left_out(waiting)):
                    self._violation("lost", f"group {number} ({waiting.prompt}) {waiting.since} and was never admitted again")
        self._find_gaps()
        self._found.in_flight = len(self._open)
        self._found.num_steps = self._version
        self._found.trained = len(self._trained)
        for kind, num in self._told.items():
            if num > MAX_TOLD:
                self._found.violations.append(f"{kind}: {num - MAX_TOLD:,} more")

    def _is_left_out(self, waiting: _WaitingGroup) -> bool:
        """Whether it was open at a checkpoint, and the run has gone on for longer than any other may be open."""
        return waiting.interrupted_at is not None and self._version - waiting.interrupted_at > self._max_staleness + 1

    def _find_gaps(self) -> None:
        """Numbers that were given out: the n-th group of a domain has its n-th number, and every one is admitted."""
        if not self._is_whole:
            return
        num_domains = self._num_domains or len(self._numbers)
        for domain, seen in self._numbers.items():
            for number in range(max(seen) % num_domains, max(seen), num_domains):
                if number not in seen:
                    name = f" of domain {domain}" if domain else ""
                    self._violation("lost", f"group {number}{name} was drawn before group {max(seen)} and never admitted")

    def _begun(self, version: int) -> None:
        if self._is_whole is None:
            self._is_whole = version == 0
        self._version = version
        for number, group in self._open.items():
            waiting = _WaitingGroup(group.prompt, f"was open at step {version}", interrupted_at=version)
            self._waiting[group.domain][number] = waiting
        self._open.clear()

    def _queued(self, event: Event) -> None:
        number, prompt, domain = event.group, event.detail["prompt"], event.detail.get("domain", "")
        group, waiting = self._open.get(number), self._waiting[domain].pop(number, None)
        if number in self._trained:
            self._violation("trained twice", f"group {number} ({prompt}) was admitted again after step {self._trained[number]}")
            return
        if group is None:
            group = self._open[number] = _OpenGroup(prompt, domain, event.detail["version"])
            if waiting is None:
                self._drawn(number, domain)
            elif waiting.prompt != prompt:
                self._violation("lost", f"group {number} was of {waiting.prompt} and came back as {prompt}")
        elif event.index in group.queued:
            self._violation("out of order", f"sample {event.sample_id} was admitted twice, and not sent back in between")
        group.queued.add(event.index)

    def _drawn(self, number: int, domain: str) -> None:
        """A prompt is admitted for the first time: none of its domain was waiting, or that one is lost."""
        self._numbers[domain].add(number)
        for waiting in self._waiting[domain].values():
            waiting.is_overtaken = True

    def _sent_back(self, number: int) -> None:
        if group := self._open.pop(number, None):
            self._found.sent_back += 1
            self._waiting[group.domain][number] = _WaitingGroup(group.prompt, f"was sent back at step {self._version}")

    def _dropped(self, number: int) -> None:
        if self._open.pop(number, None):
            self._found.dropped += 1

    def _failed(self, event: Event) -> None:
        if group := self._open.get(event.group):
            group.failed.add(event.index)
            if group.failed == group.queued:  # There is no sample left to say that the group was dropped.
                self._dropped(event.group)

    def _generating(self, event: Event) -> None:
        num_kept = event.detail.get("kept", 0)
        self._found.num_continued_tokens += num_kept
        self._found.num_discarded_tokens += event.detail.get("discarded", 0)
        if num_kept and event.group in self._open:
            self._open[event.group].continued[event.index] = num_kept
        elif "discarded" in event.detail and event.group in self._open:
            self._open[event.group].continued.pop(event.index, None)

    def _done(self, event: Event) -> None:
        group = self._open.get(event.group)
        if group is None:
            self._violation("out of order", f"sample {event.sample_id} ended, and its group is not open")
            return
        if event.index in group.ended:
            self._violation("drawn twice", f"sample {event.sample_id} ended twice")
        group.ended.add(event.index)
        trajectory = read_stored(event, text_of=lambda ids: "")
        if trajectory is None:
            self._found.num_unkept += 1
            return
        num_kept = group.continued.get(event.index, 0)
        if trajectory.num_completion_tokens < num_kept:
            self._violation(
                "lost", f"sample {event.sample_id} went on after {num_kept} tokens and has {trajectory.num_completion_tokens}"
            )
        for turn in trajectory.turns:
            completion = turn.completion
            versions = [version for version, _ in completion.versions]
            self._found.num_tokens += len(completion.token_ids)
            if sum(num for _, num in completion.versions) != len(completion.token_ids):
                self._violation("versions", f"sample {event.sample_id} has tokens of no version")
            elif versions and not group.version <= min(versions) <= max(versions) <= self._version + 1:
                self._violation(
                    "versions",
                    f"sample {event.sample_id} has tokens of versions {min(versions)} to {max(versions)}; it was admitted at "
                    f"{group.version} and ended at {self._version}",
                )

    def _was_trained(self, event: Event) -> None:
        number, version = event.group, event.detail["version"]
        self._found.num_samples += 1
        group = self._open.get(number)
        if group is None:
            before = f"after step {self._trained[number]}" if number in self._trained else "and was not open"
            kind = "trained twice" if number in self._trained else "out of order"
            self._violation(kind, f"group {number} was trained in step {version}, {before}")
            return
        if event.index not in group.ended:
            self._violation("out of order", f"sample {event.sample_id} was trained in step {version} and had not ended")
        staleness = version - 1 - group.version
        self._found.staleness = max(self._found.staleness, staleness)
        if staleness > self._max_staleness:
            self._violation("stale", f"group {number} was {staleness} versions old in step {version}")
        self._trained[number] = version
        self._in_this_step.add(number)

    def _stepped(self, version: int) -> None:
        if version != self._version + 1:
            self._violation("out of order", f"step {version} follows step {self._version}")
        self._version = version
        for number in self._in_this_step:
            self._open.pop(number, None)
        self._in_this_step.clear()
        if version in self._owed:
            self._compare_with_checkpoint(version, self._owed[version])

    def _compare_with_checkpoint(self, version: int, owed: Set[int]) -> None:
        """A run that goes on from it would admit these, and no others that were drawn before."""
        known = {number: group.prompt for number, group in self._open.items()}
        for queue in self._waiting.values():
            known |= {number: waiting.prompt for number, waiting in queue.items()}
            for number in queue.keys() & owed:
                queue[number].is_overtaken, queue[number].interrupted_at = False, None
        for number in sorted(known.keys() - owed):
            self._violation(
                "lost", f"group {number} ({known[number]}) was open at step {version}, and its checkpoint has it not"
            )
        if self._is_whole:
            for number in sorted(owed - known.keys()):
                self._violation("lost", f"group {number} is owed by the checkpoint of step {version}, and was never admitted")

    def _violation(self, kind: str, what: str) -> None:
        self._told[kind] += 1
        if self._told[kind] <= MAX_TOLD:
            self._found.violations.append(f"{kind}: {what}")


def damage_of(segment: Path) -> str | None:
    """What is wrong with a segment's events, in words. A last line that a crash tore is no damage."""
    with open_events(segment) as file:
        is_good = [bool(parse_line(line, segment)) for line in file]
    if all(is_good[:-1]):
        return None
    first = is_good.index(False)
    return f"damaged: {segment} line {first + 1} does not match its checksum, and {len(is_good) - first - 1} lines follow"


def describe(found: Audit) -> Iterator[tuple[str, str]]:
    """What was found, as rows of a table."""
    yield "started or resumed", f"{found.num_lives:,} times"
    cut = f"; events up to step {found.num_cut_steps:,} are no longer kept" if found.num_cut_steps else ""
    yield "steps", f"{found.num_steps:,}{cut}"
    yield (
        "groups trained",
        f"{found.trained:,}, with {found.num_samples:,} samples; none more than {found.staleness} versions old",
    )
    yield "groups dropped", f"{found.dropped:,}"
    yield "groups sent back", f"{found.sent_back:,}, their prompts queued again"
    yield "groups in flight", f"{found.in_flight:,} when the journal ends"
    yield "groups trained again", f"{found.undone:,}, after an interruption"
    yield "tokens continued", f"{found.num_continued_tokens:,}: written before an interruption, and not again"
    yield "tokens discarded", f"{found.num_discarded_tokens:,}: written before, and drawn anew"
    kept = f"{found.num_tokens:,}"
    yield "tokens", f"{kept}; those of {found.num_unkept:,} samples are no longer kept" if found.num_unkept else kept
    yield (
        "metrics",
        f"{found.num_metric_values:,} numbers of {found.num_metric_rows:,} steps compared with what the journal gives",
    )
