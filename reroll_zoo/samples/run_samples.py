"""The samples of a run, read from its journal: which there are, and each turn by turn, token by token."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from reroll.errors import RunFolderError
from reroll.observe.journal import read_stored
from reroll.observe.run_folder import RunFolder
from reroll.types import Prompt, Status, Trajectory
from reroll_zoo.audit.audit import counted_events
from reroll_zoo.samples.decoder import RunDecoder
from reroll_zoo.samples.episode import LoggedEpisode, episode_of
from reroll_zoo.samples.lifecycles import Lifecycle, Lifecycles, Phase


class RunSamples:
    """The samples of a run that have ended, as its folder tells of them now. What an interruption undid is left out."""

    def __init__(self, folder: Path) -> None:
        run = RunFolder(folder)
        self._decoder = RunDecoder(run)
        lives = Lifecycles()
        lives.take(counted_events(run.journal_path))
        ended = [life for life in lives.newest_first() if life.stored is not None or life.phase is Phase.FAILED]
        newest = {life.id: life for life in reversed(ended)}
        self.lives = [life for life in reversed(ended) if newest[life.id] is life]
        """Those that were scored, and those that failed, in the order of the last that happened to each. Of one that was sent
        back and admitted again, the last that has ended."""

    @property
    def problem(self) -> str:
        """Why tokens are shown as numbers, if they are."""
        return self._decoder.problem

    def find(self, id: str) -> Lifecycle:
        """The latest sample of this id. Raises RunFolderError with ids that are close."""
        for life in reversed(self.lives):
            if life.id == id:
                return life
        ids = [life.id for life in self.lives]
        close = get_close_matches(id, ids, n=3, cutoff=0.5)
        there = f"there are {len(ids)}, from {ids[0]} to {ids[-1]}: leave SAMPLE out to list them" if ids else "there is none"
        hint = f"did you mean {', '.join(close)}?" if close else there
        raise RunFolderError(f"no sample {id!r} has ended ({hint})")

    def read(self, life: Lifecycle) -> LoggedEpisode:
        """All that there is to see of it."""
        found = read_sample(life, self._decoder)
        if found is not None:
            return found
        reason = life.reason or "its tokens were deleted (run.journal_gib says how many are kept), or are damaged"
        status = Status.FAILED if life.stored is None else Status(life.status)
        unread = Trajectory(id=life.id, turns=(), status=status, reason=reason, reward=life.reward or 0.0)
        return _seen(life, unread, self._decoder)


def read_sample(life: Lifecycle, decoder: RunDecoder) -> LoggedEpisode | None:
    """A sample by the journal's tokens; None if there are none, or no longer."""
    done = life.done
    trajectory = None if done is None else read_stored(done, text_of=decoder.text)
    return None if trajectory is None else _seen(life, trajectory, decoder)


def _seen(life: Lifecycle, trajectory: Trajectory, decoder: RunDecoder) -> LoggedEpisode:
    extra = {} if life.seed is None else {"seed": life.seed}
    prompt = Prompt(id=life.prompt, messages=(), domain=life.domain, answer=life.answer, extra=extra)
    fate = "" if life.phase in (Phase.TRAINED, Phase.FAILED) else life.phase.name.lower()
    return episode_of(life.trained_version, prompt, trajectory, fate=fate, decode=decoder.with_special)
