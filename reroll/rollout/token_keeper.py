"""Keeps the tokens of unfinished samples, so that an interrupted sample continues after its last token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from reroll.observe.journal import Journal, SampleState
from reroll.types import Completion, FinishReason, Request

TellingGenerate = Callable[[Request, Callable[[NDArray[np.uint32], NDArray[np.float64], int], None]], Awaitable[Completion]]
"""Requests one completion; the second argument is called with tokens, log-probs and version as they are generated."""


class TokenKeeper:
    """A layer between the episodes of a run and its engines.

    An episode that is played again requests the same completions under the same ids. As long as the prompts are the same as
    the first time, it gets the recorded tokens: finished turns at once, and the interrupted turn is continued. So an
    environment that replies deterministically needs no snapshot. If a prompt differs, tokens are drawn anew from that turn on.
    """

    def __init__(self, journal: Journal, generate: TellingGenerate) -> None:
        self._journal = journal
        self._generate = generate
        self._serials = count()

    async def generate(self, request: Request) -> Completion:
        """The completion of this request. Cancelling the call aborts the request, and keeps the tokens reported so far."""
        tokens = self._journal.partial
        turn, num_diverged = tokens.turn(request)
        if num_diverged:
            sample_id, reason = request.id.rpartition(".")[0], "the policy was told something else than the last time"
            self._journal.record(sample_id, SampleState.GENERATING, discarded=num_diverged, reason=reason)
        completion = turn.completion()
        if completion is not None:
            return completion
        # A new id for each try: an engine may still be aborting an earlier one.
        asked = replace(request, id=f"{request.id}#{next(self._serials)}", written=turn.written())
        completion = await self._generate(asked, partial(tokens.add, request.id, turn))
        if completion.finish_reason is not FinishReason.ABORT:
            tokens.end(request.id, turn, completion)
        return completion
