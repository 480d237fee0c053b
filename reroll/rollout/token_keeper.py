"""Keeps what the samples of a run have written so far, so that one that is interrupted goes on after its last token."""

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
"""Asks an engine for one completion; the second argument gets its tokens, log-probs and version while they are written."""


class TokenKeeper:
    """Stands between the episodes of a run and its engines.

    An episode that is played again asks for the same completions under the same ids. As far as the same is said to the policy
    as the first time, it is given what was written then: whole turns at once, and of the turn that was interrupted the rest is
    generated. So an environment that answers alike needs no snapshot, and one that does not is found out: from the turn on in
    which it said something else, tokens are drawn anew.
    """

    def __init__(self, journal: Journal, generate: TellingGenerate) -> None:
        self._journal = journal
        self._generate = generate
        self._serials = count()

    async def generate(self, request: Request) -> Completion:
        """The completion of this request. Cancelling the call aborts the request, and keeps the tokens that were told."""
        tokens = self._journal.partial
        turn, num_diverged = tokens.turn(request)
        if num_diverged:
            sample_id, reason = request.id.rpartition(".")[0], "the policy was told something else than the last time"
            self._journal.record(sample_id, SampleState.GENERATING, discarded=num_diverged, reason=reason)
        completion = turn.completion()
        if completion is not None:
            return completion
        # Under a name of its own: an earlier try may be on its way out of an engine.
        asked = replace(request, id=f"{request.id}#{next(self._serials)}", written=turn.written())
        completion = await self._generate(asked, partial(tokens.add, request.id, turn))
        if completion.finish_reason is not FinishReason.ABORT:
            tokens.end(request.id, turn, completion)
        return completion
