"""A conversation with a model, in the tokens and the chat format that training uses."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

import torch

from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer, stored_dtype
from reroll.tokens.renderer import Renderer
from reroll.types import Completion, FinishReason, Message, Request, SamplingParams

_UNFINISHED = "�"
"""What a decoder writes for the first tokens of a character that takes several."""


class Chat:
    """One model and one conversation with it. Earlier turns are extended, never tokenized again, and read only once."""

    def __init__(self, model: str, *, sampling: SamplingParams, system: str | None = None) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = load_tokenizer(model)
        self._renderer = Renderer(tokenizer)
        weights = load_model(model, dtype=stored_dtype(model) or torch.float32, device=device)
        self._engine = EmbeddedEngine(weights, tokenizer, max_running=1)
        self._sampling = replace(sampling, stop_token_ids=self._renderer.stop_token_ids)
        self.max_length: int = weights.config.max_position_embeddings
        """Tokens that the model takes, prompt and answers together."""
        self._system = system
        self.begin(system)

    def answer(self, words: str, *, sampling: SamplingParams) -> str:
        """The whole answer to one message that begins a conversation, drawn as `sampling` says."""
        self.begin(self._system)
        before, self._sampling = self._sampling, replace(sampling, stop_token_ids=self._renderer.stop_token_ids)
        try:
            return "".join(self.say(words))
        finally:
            self._sampling = before

    def begin(self, system: str | None = None) -> None:
        """Forget what was said, and start again under this system message."""
        self._opening: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        self._prompt_ids: tuple[int, ...] = ()
        self._last: Completion | None = None
        self._num_turns = 0

    def say(self, words: str) -> Generator[str, None, None]:
        """The answer to the next message, piece by piece as it is written. Leaving the iterator early cuts it there.

        Raises ValueError if the conversation has grown longer than the model takes.
        """
        message: Message = {"role": "user", "content": words}
        if self._last is None:
            prompt_ids = self._renderer.start([*self._opening, message])
        else:
            prompt_ids = self._renderer.extend(self._prompt_ids, self._last.token_ids, [message])
        # Each turn is drawn anew: with one seed for all, equal openings of two answers would go on equally.
        sampling = replace(self._sampling, seed=self._sampling.seed + self._num_turns)
        request = Request(id=f"turn-{self._num_turns}", prompt_ids=prompt_ids, sampling=sampling)
        self._engine.submit(request)
        self._prompt_ids, self._num_turns = prompt_ids, self._num_turns + 1
        try:
            yield from self._written(request.id)
        finally:
            if self._engine.num_unfinished:
                self._engine.abort(request.id)
                self._end(self._engine.step()[0].completion)

    @property
    def was_cut(self) -> bool:
        """Whether the last answer reached the limit of its length instead of ending by itself."""
        return self._last is not None and self._last.finish_reason is FinishReason.LENGTH

    def _written(self, id: str) -> Iterator[str]:
        shown = ""
        while self._engine.num_unfinished:
            for finished in self._engine.step():
                self._end(finished.completion)
            is_over = self._engine.num_unfinished == 0
            ids = self._last.token_ids if is_over and self._last else self._engine.tokens_so_far(id)
            text = self._renderer.decode(ids)
            if is_over or not text.endswith(_UNFINISHED):
                yield text[len(shown) :]
                shown = text

    def _end(self, completion: Completion) -> None:
        self._last = completion
