"""Guesses at the next tokens of a sequence, from what its siblings, earlier answers and its own context say."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from reroll.infer.embedded.drafts import NO_DRAFT, DraftedTokens
from reroll.infer.sequence import SequenceState

_ORDERS = (4, 2, 1)
"""How many tokens before a token are looked up, the most telling first."""

_MOST_VOTES = 3

_MAX_PROMPT_TOKENS = 4096
"""Of a prompt that are read for drafts: its last ones."""

_MAX_KEPT_TEXTS, _MAX_KEPT_TOKENS = 16, 1 << 22
"""Ended answers that are kept of a prompt, and their tokens over all prompts."""

_FORGET_AFTER = 512
"""Guesses of a kind, after which older ones count half."""


@dataclass(slots=True, eq=False)
class _Text:
    """An answer, and how much of it is in the table."""

    tokens: Sequence[int]
    num_read: int = 0


class _SiblingTexts:
    """What is said after one prompt: the answers under way, and the last ones of before."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = list(prompt[-_MAX_PROMPT_TOKENS:])
        self._running: dict[int, _Text] = {}
        self._ended: list[_Text] = []
        self._table: dict[tuple[int, ...], tuple[int, int]] = {}

    @property
    def is_idle(self) -> bool:
        return not self._running

    @property
    def num_kept(self) -> int:
        return len(self._prompt) + sum(len(text.tokens) for text in self._ended)

    def join(self, sequence: SequenceState) -> None:
        self._running[id(sequence)] = _Text(sequence.tokens)

    def leave(self, sequence: SequenceState) -> None:
        text = self._running.pop(id(sequence))
        self._ended.append(_Text(array("i", text.tokens), text.num_read))
        del self._ended[:-_MAX_KEPT_TEXTS]
        if self.is_idle:  # The table takes many times the room of what it was made from.
            self._table.clear()
            for text in self._ended:
                text.num_read = 0

    def read(self) -> None:
        """Take into the table what was written since."""
        if not self._table:
            self._take(self._prompt, 1)
            for text in self._ended:
                self._read(text)
        for text in self._running.values():
            if text.num_read < len(text.tokens):
                self._read(text)

    def likely_next(self, context: tuple[int, ...]) -> tuple[int, tuple[int, int]] | None:
        """What followed such a context, and how well it is founded: tokens that match, and votes."""
        for order in _ORDERS:
            found = self._table.get(context[-order:])
            if found is not None:
                return found[0], (order, found[1])
        return None

    def _read(self, text: _Text) -> None:
        before = max(0, text.num_read - _ORDERS[0])
        head = self._prompt[-_ORDERS[0] :] if not before else []
        self._take([*head, *text.tokens[before:]], len(head) + text.num_read - before)
        text.num_read = len(text.tokens)

    def _take(self, tokens: Sequence[int], first: int) -> None:
        """Note what came before each of these tokens, from the first on. One that keeps coming is not ousted by one other."""
        table = self._table
        for place in range(max(first, 1), len(tokens)):
            token = tokens[place]
            for order in _ORDERS:
                if order > place:
                    continue
                key = tuple(tokens[place - order : place])
                known, votes = table.get(key, (token, -1))
                if known == token:
                    table[key] = (token, min(votes + 1, _MOST_VOTES))
                else:
                    table[key] = (known, votes - 1) if votes else (token, 0)


@dataclass(slots=True)
class _Acceptance:
    """How often guesses of one kind were right. A kind that was never tried is right in half of all cases."""

    num_right: float = 1.0
    num_tried: float = 2.0

    @property
    def rate(self) -> float:
        return self.num_right / self.num_tried

    def add(self, *, is_right: bool) -> None:
        self.num_tried += 1
        self.num_right += is_right
        if self.num_tried > _FORGET_AFTER:
            self.num_right, self.num_tried = self.num_right / 2, self.num_tried / 2


class SiblingDrafter:
    """A `Drafter`. It learns how often guesses of each kind are right, and leaves out those that
    would, with all before them, be right more seldom than it is asked for."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[int, ...], _SiblingTexts] = OrderedDict()  # Least recently asked for first.
        self._num_kept = 0
        self._acceptance: dict[tuple[int, int], _Acceptance] = {}

    def join(self, sequence: SequenceState) -> None:
        """A request has come: what is written for it is followed from now on."""
        prompt = sequence.request.prompt_ids
        group = self._groups.get(prompt)
        if group is None:
            group = self._groups[prompt] = _SiblingTexts(prompt)
            self._num_kept += group.num_kept
        group.join(sequence)
        self._groups.move_to_end(prompt)

    def leave(self, sequence: SequenceState) -> None:
        """A request has ended. What was written for it is kept for others of its prompt, while there is room."""
        group = self._groups[sequence.request.prompt_ids]
        before = group.num_kept
        group.leave(sequence)
        self._num_kept += group.num_kept - before
        idle = [prompt for prompt, other in self._groups.items() if other.is_idle] if self._is_full else []
        for prompt in idle:
            if not self._is_full:
                break
            self._num_kept -= self._groups.pop(prompt).num_kept

    def draft(self, sequence: SequenceState, *, max_tokens: int, least: float) -> DraftedTokens:
        """At most so many tokens, each of which is drawn with a probability of at least `least`."""
        group = self._groups[sequence.request.prompt_ids]
        group.read()
        longest = _ORDERS[0]
        context = (*sequence.request.prompt_ids[-longest:], *sequence.tokens[-longest:])[-longest:]
        tokens: list[int] = []
        kinds: list[tuple[int, int]] = []
        probability = 1.0
        while len(tokens) < max_tokens and (guess := group.likely_next(context)) is not None:
            token, kind = guess
            probability *= self._acceptance.setdefault(kind, _Acceptance()).rate
            if probability < least:
                break
            tokens.append(token)
            kinds.append(kind)
            context = (*context[1:], token) if len(context) == longest else (*context, token)
        return DraftedTokens(tuple(tokens), tuple(kinds)) if tokens else NO_DRAFT

    def learn(self, draft: DraftedTokens, *, num_right: int, num_known: int) -> None:
        """Of the first `num_known` guesses so many were right, one after the other."""
        for place, kind in enumerate(draft.kinds[:num_known]):
            self._acceptance.setdefault(kind, _Acceptance()).add(is_right=place < num_right)

    @property
    def _is_full(self) -> bool:
        return self._num_kept > _MAX_KEPT_TOKENS
