"""The journal: what happened to every sample, and every sample that ended, token by token. One source for resume and audit.

journal/000000.jsonl   events in the order in which they happened. A line tells of one or, if the same happened to several at a
                       time, of all: of samples of a group (`of`), or of samples of any (`ids`, and `each` with what is told of
                       them, one after the other). It ends with its checksum
journal/000000.tokens  what ended samples wrote and earned; events say where
journal/in-flight.tokens  what samples that have not ended wrote so far (`partial_samples`)

A pair of files is a segment; a new one is begun whenever a run is started or resumed, and when one is large. The tokens of
the oldest segments are deleted when all together outgrow a bound, and so are events, those of closed segments `.jsonl.gz`.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from json.encoder import encode_basestring_ascii
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, NoReturn, cast

from reroll.errors import RunFolderError
from reroll.observe.files import explained, sync
from reroll.observe.partial_samples import PartialSamples
from reroll.observe.trajectory_bytes import Decode, Told, decode, decode_ids, encode_all, encode_prompt, to_json
from reroll.types import Message, Trajectory, Versions

JOURNAL_FOLDER = "journal"
_EVENTS, _TOKENS = ".jsonl", ".tokens"
PACKED = ".gz"
"""What follows the name of a file of events that was packed (the group `reroll.journals`)."""
_EVENTS_SHARE = 10
"""Of the bytes that tokens may have, events may have one in so many."""
_MAX_SEGMENT_BYTES = 1 << 26
"""Of a segment's tokens, and of its events. Then the next is begun."""
_BUFFER_BYTES = 1 << 18
_MAX_WAITING = 1024
"""Events that wait for `flush`. What can be written together is."""
_MAX_PROMPTS = 4096
"""How many groups' prompts are remembered, to be written once for all siblings."""
_INDICES = "of"
"""What names the samples in a line that is about several of a group; its id is the group's number."""
_IDS, _EACH = "ids", "each"
"""What names those that a line is about, if there are several, and what is told of each, by name."""
_TIME = "t"
_SAME_TIME_S = 1e-3
"""Within it, events of one line have one time."""
_CHECKSUM = b',"crc":"'
"""What an event's line has before its checksum, which is that of all before it."""


class SampleState(StrEnum):
    """Where a sample is in its life. The last four end it."""

    QUEUED = "queued"
    GENERATING = "generating"
    SCORING = "scoring"
    DONE = "done"
    """Scored; waits for its siblings and for its turn to be trained on."""
    FILTERED = "filtered"
    """Fine by itself, but its group was dropped."""
    ABORTED = "aborted"
    """Stopped by the scheduler; the prompt is queued again."""
    FAILED = "failed"
    TRAINED = "trained"


QUEUED_AGAIN = "queued again"
"""Reason of an ABORTED event: the prompt is at the front of the queue."""
_STATES = {state.value: state for state in SampleState}
BEGUN, CONTINUED, TAKEN, STEPPED = "begun", "continued", "taken", "stepped"
"""States of events that are of no sample. A segment is opened because a run was started or resumed, or because the one before
was full; detail: `version`, the weights that the run goes on from, `config`, a fingerprint of all that decides what is
sampled, and `attempt`, one more than the number of times that the run was started anew by itself. The `groups` of these numbers
were taken: a step begins to train on them. A step is over, and its weights of this `version` are with the engines: what a
checkpoint of it holds happened before this event, and a run that begins with this version undoes all after it."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a journal."""

    time_s: float
    sample_id: str
    """`GROUP.INDEX`; empty for what happens to no sample."""
    state: SampleState | str
    """Of a sample; or BEGUN, CONTINUED, TAKEN or STEPPED."""
    detail: Mapping[str, Any]
    """What else is known at that point, e.g. `version`, `tokens`, `reason`."""
    segment: Path
    """Its file."""

    @property
    def group(self) -> int:
        """The number of the sample's group."""
        return int(self.sample_id.partition(".")[0])

    @property
    def index(self) -> int:
        """Which of its group's samples it is."""
        return int(self.sample_id.partition(".")[2])


class StoredSample(NamedTuple):
    """Where a sample's bytes, and its first prompt, lie in a segment's tokens; the checksum of both."""

    at: int
    size: int
    prompt_at: int
    prompt_size: int
    """Of its ids."""
    crc: int
    shown_size: int = 0
    """Of its messages, which follow them."""


class _StoredPrompt(NamedTuple):
    """Where a prompt lies, how many bytes its ids and its messages have, and their checksum."""

    ids: tuple[int, ...]
    shown: tuple[Message, ...]
    at: int
    size: int
    shown_size: int
    crc: int


class _WaitingEvent(NamedTuple):
    """An event that is not written yet."""

    time_s: float
    id: str
    state: str
    detail: dict[str, Any]


class _WaitingSample(NamedTuple):
    """A sample that has ended and is not written yet."""

    time_s: float
    id: str
    trajectory: Trajectory
    told: Told


_Waiting = list[_WaitingEvent] | list[_WaitingSample]


class Journal:
    """Append-only. What was recorded is out of this process's hands when `flush` returns.

    What a crash tore is left out when it is read. Every failing write raises RunFolderError with the path and the fix.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: str = "",
        attempt: int = 1,
        text_of: Decode = str,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`config` is a fingerprint of all that decides what is sampled. Of tokens `max_bytes` are kept, in whole segments,
        and of events a tenth as many; None keeps all. Nothing is written before the first event."""
        self.folder = folder
        self._config = config
        self._attempt = attempt
        self._text_of = text_of
        self._max_bytes = max_bytes
        self._clock = clock
        self._version = 0
        self._earlier = segments(folder)
        """Those that were there before this one was opened."""
        self._segment: _Segment | None = None
        self._waiting: list[_WaitingEvent | _WaitingSample] = []
        """What was recorded and not written, in its order."""
        self.partial = PartialSamples(folder, config=config)
        """What samples that have not ended wrote so far."""

    def resume(self, *, version: int, max_staleness: int) -> RecordedSamples:
        """Go on from weights of this version, before the first event. What a run has sampled since that may be taken again:
        `partial` then knows the samples that had not ended.

        Groups that are still open then were admitted under weights at most `max_staleness` versions older.
        """
        self._version = version
        self.partial.load()
        oldest = version - max_staleness
        return RecordedSamples(_events_since(self._earlier, oldest), config=self._config, text_of=self._text_of)

    def record(self, sample_id: str, state: str, **detail: Any) -> None:
        """Add one event. Detail values must be plain JSON values."""
        self._add(_WaitingEvent(self._time_s(), sample_id, state, detail))

    def record_group(self, number: int, indices: Sequence[int], state: str, **detail: Any) -> None:
        """Add the same event for each of these samples of a group."""
        if indices:
            self._add(_WaitingEvent(self._time_s(), str(number), state, {_INDICES: indices, **detail}))

    def ended(self, sample_id: str, trajectory: Trajectory) -> None:
        """The sample is scored, and waits to be trained on: keep all of it."""
        told = self.partial.told(sample_id)
        self.partial.forget(sample_id)
        self._add(_WaitingSample(self._time_s(), sample_id, trajectory, told))

    def taken(self, groups: Sequence[int]) -> None:
        """A step begins to train on the groups of these numbers."""
        self.record("", TAKEN, groups=list(groups))
        self.flush()

    def stepped(self, *, version: int) -> None:
        """A step is over, and weights of this version are with the engines."""
        self.record("", STEPPED, version=version)
        self.flush()

    def flush(self) -> None:
        """Hand what was recorded to the operating system: from then on a crash of this process cannot lose it."""
        if self._segment is not None:
            self._write_waiting()
            self._segment.flush()
        self.partial.flush()

    def close(self) -> None:
        """Flush and close. Safe to call twice."""
        if self._segment is not None:
            self._write_waiting()
            self._segment.close()
        self.partial.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _time_s(self) -> float:
        """Of the next event. The first opens the journal."""
        if self._segment is None:
            self._segment = self._opened(BEGUN)
        return self._clock()

    def _add(self, event: _WaitingEvent | _WaitingSample) -> None:
        self._waiting.append(event)
        if len(self._waiting) >= _MAX_WAITING:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write what was recorded since the last time."""
        waiting, self._waiting = self._waiting, []
        for run in _runs(waiting):
            assert self._segment is not None
            self._segment.write(run)
            if self._segment.is_full:
                self._segment.close()
                self._segment = self._opened(CONTINUED)
                self._delete_oldest()

    def _opened(self, state: str) -> _Segment:
        last = max((int(path.stem) for path in segments(self.folder)), default=-1)
        segment = _Segment(self.folder / f"{last + 1:06d}{_EVENTS}")
        detail = {"version": self._version, "config": self._config, "attempt": self._attempt}
        segment.write([_WaitingEvent(self._clock(), "", state, detail)])
        segment.flush()
        return segment

    def _delete_oldest(self) -> None:
        if self._max_bytes is not None:
            files = segments(self.folder)
            _keep_newest([path.with_suffix(_TOKENS) for path in files], self._max_bytes)
            events = [path if path.exists() else Path(f"{path}{PACKED}") for path in files]
            _keep_newest(events, self._max_bytes // _EVENTS_SHARE)


def _keep_newest(files: Sequence[Path], max_bytes: int) -> None:
    """Delete the oldest, but for the last two, which hold what a resumed run would take."""
    sizes = [path.stat().st_size if path.exists() else 0 for path in files]
    for number, path in enumerate(files[:-2]):
        if sum(sizes[number:]) > max_bytes:
            path.unlink(missing_ok=True)


def _runs(waiting: Sequence[_WaitingEvent | _WaitingSample]) -> list[_Waiting]:
    """Events that can be told in one line, together. Those of one sample stay in their order."""
    runs: list[Any] = []
    scoring: list[_WaitingEvent] = []
    done: list[_WaitingSample] = []
    for one in waiting:
        if type(one) is _WaitingSample:
            if not done:
                runs.append(done)
            done.append(one)
            continue
        assert type(one) is _WaitingEvent
        last = scoring if one.state is SampleState.SCORING else runs[-1] if runs else None
        if (
            last
            and type(last[0]) is _WaitingEvent
            and last[0].state is one.state
            and last[0].detail.keys() == one.detail.keys()
        ):
            last.append(one)  # Samples that are judged at once: all their scorings began before any has ended.
            if one.state is SampleState.SCORING:
                continue
        else:
            runs.append([one])
        scoring, done = runs[-1] if one.state is SampleState.SCORING else [], []
    return runs


class _Segment:
    """The two files that are being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_event_bytes = self._num_token_bytes = 0
        self._prompts: OrderedDict[str, _StoredPrompt] = OrderedDict()
        """By the group whose samples were told so, at first."""
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._tokens = path.with_suffix(_TOKENS).open("xb", buffering=_BUFFER_BYTES)
            self._events = path.open("xb", buffering=_BUFFER_BYTES)

    @property
    def is_full(self) -> bool:
        return max(self._num_event_bytes, self._num_token_bytes) > _MAX_SEGMENT_BYTES

    def write(self, run: _Waiting) -> None:
        """Write events as one line. What samples wrote comes before the event that says where."""
        first, state = run[0], str(SampleState.DONE)
        told: dict[str, list[Any]]
        if type(first) is _WaitingSample:
            told = self._store(cast("list[_WaitingSample]", run))
        else:
            events = cast("list[_WaitingEvent]", run)
            state, told = events[0].state, {name: [one.detail[name] for one in events] for name in events[0].detail}
        if len(run) == 1:
            head = f'"id":{encode_basestring_ascii(first.id)}'
            more = to_json({name: values[0] for name, values in told.items()})[1:-1]
        else:
            if run[-1].time_s - first.time_s > _SAME_TIME_S:
                told[_TIME] = [round(one.time_s, 6) for one in run]
            head, more = f'"ids":{to_json([one.id for one in run])}', f'"each":{to_json(told)}'
        body = f'{{"t":{first.time_s:.6f},{head},"state":"{state}"{"," if more else ""}{more}'.encode()
        line = b'%b%b%08x"}\n' % (body, _CHECKSUM, zlib.crc32(body))
        self._write(self._events, line)
        self._num_event_bytes += len(line)

    def _store(self, run: Sequence[_WaitingSample]) -> dict[str, list[Any]]:
        """Write what these samples wrote; what their events say."""
        stored = []
        for ended, data in zip(run, encode_all([(one.trajectory, one.told) for one in run]), strict=True):
            prompt = self._prompt(ended)
            at, crc = self._append(data), zlib.crc32(data, prompt.crc)
            stored.append((at, len(data), prompt.at, prompt.size, crc, prompt.shown_size))
        samples = [one.trajectory for one in run]
        return {
            "reward": [sample.reward for sample in samples],
            "status": [sample.status for sample in samples],
            "versions": [sample.versions for sample in samples],
            "stored": stored,
        }

    def _prompt(self, ended: _WaitingSample) -> _StoredPrompt:
        """Where the prompt of a sample lies. It is written with the first of its siblings."""
        turns = ended.trajectory.turns
        ids, shown = (turns[0].prompt_ids, turns[0].shown) if turns else ((), ())
        group = ended.id.partition(".")[0]
        prompt = self._prompts.get(group)
        if prompt is None or prompt.ids != ids or prompt.shown != shown:
            data, messages = encode_prompt(turns)
            crc = zlib.crc32(messages, zlib.crc32(data))
            prompt = _StoredPrompt(ids, shown, self._append(data + messages), len(data), len(messages), crc)
            self._prompts[group] = prompt
            if len(self._prompts) > _MAX_PROMPTS:
                self._prompts.popitem(last=False)
        return prompt

    def flush(self) -> None:
        try:
            self._tokens.flush()  # First: an event never speaks of bytes that are not there.
            self._events.flush()
        except OSError:
            self._explain()

    def close(self) -> None:
        with explained(self._path):
            self._tokens.close()
            self._events.close()

    def _append(self, data: bytes) -> int:
        at = self._num_token_bytes
        self._write(self._tokens, data)
        self._num_token_bytes += len(data)
        return at

    def _write(self, file: BinaryIO, data: bytes) -> None:
        try:
            file.write(data)
        except OSError:
            self._explain()

    def _explain(self) -> NoReturn:
        """Rare: the context manager that explains an error would cost every write."""
        with explained(self._path):
            raise


Rewards = Mapping[int, Mapping[int, float]]
"""Of samples, by the number of their group and their index."""


class RecordedSamples:
    """Samples that a run scored and, as far as its checkpoint knows, did not train on: they need not be drawn again."""

    def __init__(self, events: Iterable[Event], *, config: str, text_of: Decode) -> None:
        """Of the events of a run with another fingerprint nothing is taken: it would draw other samples."""
        self._text_of = text_of
        self._found: dict[tuple[int, str], dict[int, Event]] = {}
        """By a group's number and prompt: ended samples by their index."""
        self._trained: dict[int, Rewards] = {}
        """By the version that a step gave."""
        prompts: dict[int, str] = {}
        ended: defaultdict[int, dict[int, float]] = defaultdict(dict)
        taken: Sequence[int] = ()
        is_same = False
        for event in events:
            if event.state in (BEGUN, CONTINUED):
                is_same = event.detail["config"] == config
                if event.state == BEGUN:
                    ended.clear()
            elif event.state == SampleState.QUEUED:
                prompts[event.group] = event.detail["prompt"]
                ended[event.group].pop(event.index, None)
            elif event.state == SampleState.DONE and is_same and event.group in prompts and "versions" in event.detail:
                self._found.setdefault((event.group, prompts[event.group]), {})[event.index] = event
                ended[event.group][event.index] = event.detail["reward"]
            elif event.state == TAKEN:
                taken = event.detail["groups"]
            elif event.state == STEPPED:
                version, rewards = event.detail["version"], {number: ended[number] for number in taken}
                self.stepped(version, rewards)
                self._trained[version] = rewards

    def stepped(self, version: int, rewards: Rewards) -> bool:
        """A step trained on samples with these rewards. False if it once trained on others (one had failed that now did not):
        what the weights of that time wrote is lost, and not taken any more."""
        if self._trained.pop(version, rewards) == rewards:
            return True
        self._trained = {earlier: found for earlier, found in self._trained.items() if earlier < version}
        for samples in self._found.values():
            for index in [index for index, event in samples.items() if Versions(*event.detail["versions"]).newest >= version]:
                del samples[index]
        return False

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    def versions(self, number: int, prompt_id: str) -> list[Versions]:
        """For each sample of such a group, the weights that wrote it."""
        return [Versions(*event.detail["versions"]) for event in self._found.get((number, prompt_id), {}).values()]

    def take(self, number: int, prompt_id: str, *, index: int, fits: Callable[[Versions], bool]) -> Trajectory | None:
        """A sample of such a group, as it was; None if there is none whose weights fit, or its bytes are deleted or damaged."""
        event = self._found.get((number, prompt_id), {}).pop(index, None)
        if event is None or not fits(Versions(*event.detail["versions"])):
            return None
        return read_stored(event, text_of=self._text_of)


def _events_since(earlier: Sequence[Path], version: int) -> Iterator[Event]:
    """All events of these segments after weights of this version came to be, and some before."""
    needed: list[list[Event]] = []
    for segment in reversed(earlier):
        needed.append(list(read_events(segment)))
        if any(event.state == STEPPED and event.detail["version"] <= version for event in needed[-1]):
            break
    return chain.from_iterable(reversed(needed))


def segments(folder: Path) -> list[Path]:
    """The files of events, oldest first. Of some there is only the packed form, which `open_events` reads."""
    found = {path.name.removesuffix(PACKED).removesuffix(_EVENTS) for path in folder.glob(f"*{_EVENTS}*")}
    return [folder / f"{stem}{_EVENTS}" for stem in sorted(found) if stem.isdigit()]


def open_events(segment: Path) -> BinaryIO:
    """A segment's events, packed or not."""
    try:
        return segment.open("rb")
    except FileNotFoundError:  # Packed, perhaps just now.
        return cast(BinaryIO, gzip.open(f"{segment}{PACKED}"))


def sync_journal(folder: Path) -> None:
    """Wait until the newest segment is on disk: for a checkpoint that must find it after a power cut."""
    for path in segments(folder)[-1:]:
        for file in (path.with_suffix(_TOKENS), path):
            if file.exists():
                sync(file)


def read_events(segment: Path) -> Iterator[Event]:
    """The events of a segment, oldest first. What follows a line that a crash tore is left out."""
    for events in _read_lines(segment):
        yield from events


def _read_lines(segment: Path) -> Iterator[list[Event]]:
    """What each line tells of, up to the first that is damaged."""
    try:
        with open_events(segment) as file:
            for line in file:
                if not (events := parse_line(line, segment)):
                    return
                yield events
    except (OSError, EOFError, zlib.error) as error:
        raise RunFolderError(f"{segment}: cannot read the journal ({error}): is this a run folder?") from error


def parse_line(line: bytes, segment: Path) -> list[Event]:
    """The event that a whole line tells of, or those of several samples of a group; none if it is damaged."""
    body, _, checksum = line.rpartition(_CHECKSUM)
    if not body or checksum != b'%08x"}\n' % zlib.crc32(body):
        return []
    row = json.loads(body.decode() + "}")
    time_s, state = row.pop(_TIME), row.pop("state")
    state, events = _STATES.get(state, state), []
    for id, detail in [(row.pop("id"), row)] if "id" in row else zip(row[_IDS], _details(row), strict=True):
        at_s, indices = detail.pop(_TIME, time_s), detail.pop(_INDICES, None)
        ids = [id] if indices is None else [f"{id}.{index}" for index in indices]
        events += [Event(at_s, id, state, detail, segment) for id in ids]
    return events


def _details(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What a line tells of each of several."""
    each = row[_EACH]
    return [{name: values[place] for name, values in each.items()} for place in range(len(row[_IDS]))]


def read_journal(folder: Path) -> Iterator[Event]:
    """All events, oldest first."""
    for segment in segments(folder):
        yield from read_events(segment)


def read_stored(event: Event, *, text_of: Decode) -> Trajectory | None:
    """The trajectory of a DONE event; None if its tokens were deleted, or are damaged."""
    stored = StoredSample(*event.detail["stored"])
    try:
        with event.segment.with_suffix(_TOKENS).open("rb") as file:
            file.seek(stored.at)
            data = file.read(stored.size)
            file.seek(stored.prompt_at)
            prompt = file.read(stored.prompt_size + stored.shown_size)
    except OSError:
        return None
    if zlib.crc32(data, zlib.crc32(prompt)) != stored.crc:
        return None
    prompt_ids, shown = decode_ids(prompt[: stored.prompt_size]), prompt[stored.prompt_size :]
    return decode(data, id=event.sample_id, prompt_ids=prompt_ids, shown=shown, text_of=text_of)
