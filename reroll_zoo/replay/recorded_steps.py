"""The steps of a run as its journal has them: which groups each was trained on, in which order, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reroll.errors import RunFolderError
from reroll.observe.journal import BEGUN, STEPPED, Event, SampleState, read_journal, read_stored, segments
from reroll.types import Group, Prompt, Trajectory
from reroll_zoo.audit.audit import counted_events


@dataclass(slots=True)
class RecordedGroup:
    """What is known of a group so far."""

    prompt_id: str
    domain: str
    version: int
    baseline: int | None
    """Which of its samples is the greedy one."""
    ended: dict[int, Event] = field(default_factory=dict)
    """Where its samples are kept, by their index."""
    trained: list[int] = field(default_factory=list)


def num_recorded_steps(journal: Path) -> int:
    """How many steps a run had finished when its journal ends."""
    if not segments(journal):
        raise RunFolderError(f"{journal} holds no journal: the run drew no samples, or was made by an earlier version")
    versions = [event.detail["version"] for event in read_journal(journal) if event.state in (BEGUN, STEPPED)]
    return versions[-1] if versions else 0  # Where a run goes on from an earlier step, those after it are undone.


def recorded_steps(journal: Path, *, start: int = 0) -> Iterator[tuple[int, list[Group]]]:
    """The number of each step after `start`, counted from 1, and the groups that it was trained on, oldest step first.

    Prompts have their id and domain; texts are left out, as no update reads them. Raises RunFolderError where samples were
    deleted or are damaged.
    """
    events = counted_events(journal)
    if start < events.found.num_cut_steps:
        raise RunFolderError(
            f"{journal} no longer holds all events up to step {events.found.num_cut_steps} (run.journal_gib bounds how much is "
            "kept; begin after a later step that has a checkpoint)"
        )
    for step, trained in trained_groups(events):
        if step > start:
            yield step, read_groups(trained, step=step)


def trained_groups(events: Iterable[Event]) -> Iterator[tuple[int, Mapping[int, RecordedGroup]]]:
    """The number of each step, and what the events that count say of the groups that it was trained on, by their numbers."""
    groups: dict[int, RecordedGroup] = {}
    trained: dict[int, RecordedGroup] = {}
    for event in events:
        match event.state:
            case SampleState.QUEUED:
                if event.group not in groups or event.index == 0:
                    groups[event.group] = _group(event)
            case SampleState.DONE:
                groups[event.group].ended[event.index] = event
            case SampleState.TRAINED:
                trained.setdefault(event.group, groups[event.group]).trained.append(event.index)
            case SampleState.FILTERED:
                groups.pop(event.group, None)
            case _ if event.state == STEPPED:
                yield event.detail["version"], trained
                for number in trained:
                    del groups[number]
                trained = {}


def read_groups(trained: Mapping[int, RecordedGroup], *, step: int) -> list[Group]:
    """The groups that a step was trained on, token by token."""
    return [_read(number, group, step=step) for number, group in trained.items()]


def _group(queued: Event) -> RecordedGroup:
    about = queued.detail
    try:
        return RecordedGroup(about["prompt"], about["domain"], about["version"], about.get("baseline"))
    except KeyError as error:
        raise RunFolderError(f"{queued.segment} has no {error} of its groups: it was written by an earlier version") from None


def _read(number: int, recorded: RecordedGroup, *, step: int) -> Group:
    siblings: list[Trajectory] = []
    baseline: float | None = None
    for index in recorded.trained:
        event = recorded.ended[index]
        if (sample := read_stored(event, text_of=lambda ids: "")) is None:
            raise RunFolderError(
                f"the tokens of sample {event.sample_id}, trained in step {step}, are no longer in {event.segment.parent}, or "
                "are damaged (run.journal_gib bounds how much is kept; begin after a later step that has a checkpoint)"
            )
        if index == recorded.baseline:
            baseline = sample.reward
        else:
            siblings.append(sample)
    prompt = Prompt(id=recorded.prompt_id, messages=(), domain=recorded.domain)
    return Group(number=number, prompt=prompt, trajectories=tuple(siblings), version=recorded.version, baseline=baseline)
