"""One episode: the policy generates a turn, the environment replies, until the episode ends; again, if that was lost."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from reroll.envs.base import AsyncEnv, StepResult
from reroll.errors import EnvError, EnvLost
from reroll.types import Completion, FinishReason, Message, Prompt, Request, SamplingParams, Status, Trajectory, Turn


def stable_seed(*parts: int) -> int:
    """A 63-bit seed from the numbers that name a draw, e.g. (run seed, group number, sibling). Order counts."""
    digest = blake2b(b",".join([b"%d" % part for part in parts]), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


if TYPE_CHECKING:  # It loads transformers, which a simulated run does not need.
    from reroll.tokens.renderer import Renderer

Generate = Callable[[Request], Awaitable[Completion]]
"""Requests one completion from an engine. Cancelling the call aborts the request."""

_log = logging.getLogger(__name__)


class AgentEpisode(Protocol):
    """Runs an agent for one episode. A failure of the agent becomes the sample's status; a failure of the engine is raised.
    A reward that the agent reports becomes the trajectory's, with non-empty parts.
    """

    async def __call__(
        self,
        prompt: Prompt,
        generate: Generate,
        renderer: Renderer,
        sampling: SamplingParams,
        *,
        id: str,
        max_total_tokens: int,
    ) -> Trajectory: ...


class SingleTurn:
    """Shows the prompt, takes one answer, ends. The reward comes from the domain's Reward."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    async def reset(self) -> tuple[Message, ...]:
        return self.prompt.messages

    async def step(self, action: str) -> StepResult:
        return StepResult(terminated=True)

    async def close(self) -> None:
        return None


async def play(
    env: AsyncEnv,
    generate: Generate,
    renderer: Renderer,
    sampling: SamplingParams,
    *,
    id: str,
    max_prompt_tokens: int,
    max_turns: int,
    max_total_tokens: int | None = None,
    history: int | None = None,
) -> Trajectory:
    """Play one episode in `env`, and close it in any case.

    A failure of this sample (EnvError, a prompt that is too long) becomes its status; EnvLost and bugs are raised. Each turn's
    seed derives from `sampling.seed`. `max_total_tokens` bounds prompt and completion together: a later turn gets what is
    left. With `history` (at least 1), a turn sees only the opening and that many exchanges before it: its prompt no longer
    extends the previous one, and the trajectory gives several training rows. The reward is the sum of the environment's.
    """
    episode = _RunningEpisode(env, generate, renderer, sampling, id, max_total_tokens or _NO_LIMIT)
    try:
        status, reason = await episode.run(max_prompt_tokens=max_prompt_tokens, max_turns=max_turns, history=history)
    except EnvLost:
        raise
    except EnvError as error:
        status, reason = Status.FAILED, str(error) or type(error).__name__
    finally:
        await _close(env, id)
    turns = tuple(episode.turns)
    return Trajectory(id=id, turns=turns, status=status, reason=reason, reward=sum(turn.reward for turn in turns))


_NO_LIMIT = 1 << 62


class _RunningEpisode:
    """Holds the turns so far, which are kept if the environment fails half-way."""

    def __init__(
        self, env: AsyncEnv, generate: Generate, renderer: Renderer, sampling: SamplingParams, id: str, max_total_tokens: int
    ) -> None:
        self._env = env
        self._generate = generate
        self._renderer = renderer
        self._sampling = sampling
        self._stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *renderer.stop_token_ids)))
        self._id = id
        self._max_total_tokens = max_total_tokens
        self.turns: list[Turn] = []

    async def run(self, *, max_prompt_tokens: int, max_turns: int, history: int | None) -> tuple[Status, str]:
        opening = self._renderer.kept(await self._env.reset())
        prompt_ids = self._renderer.start(opening)
        state = None
        if len(prompt_ids) > max_prompt_tokens:
            return Status.FAILED, (
                f"the prompt has more than {max_prompt_tokens} tokens: raise rollout.max_prompt_tokens or drop long prompts"
            )
        for turn_index in range(max_turns):
            if len(prompt_ids) >= self._max_total_tokens:
                status = Status.TRUNCATED if self.turns else Status.FAILED
                return status, f"the prompt leaves no room within {self._max_total_tokens} tokens of context"
            shown = self.turns[-1].reply if self.turns else opening
            turn = await self._turn(prompt_ids, turn_index, state, shown)
            if turn.completion.finish_reason is FinishReason.ABORT:
                return Status.ABORTED, "the engine aborted the request"
            # A truncated completion is played as it is: ending the episode here would be a way out of a losing game.
            outcome = await self._env.step(turn.text)
            reply = self._renderer.kept(outcome.messages)
            if reply or outcome.reward or outcome.info:
                self.turns[-1] = replace(turn, reply=reply, reward=outcome.reward, info=outcome.info)
            state = outcome.state
            if outcome.terminated and turn.completion.finish_reason is FinishReason.LENGTH:
                return Status.TRUNCATED, "the completion reached its token limit (rollout.max_tokens)"
            if outcome.terminated:
                return Status.COMPLETED, ""
            if outcome.truncated:
                return Status.TRUNCATED, "the environment reached a limit of its own"
            if history is not None and len(self.turns) > history:
                prompt_ids = self._renderer.start([*opening, *self._recent(history)])
            else:
                prompt_ids = self._renderer.extend(prompt_ids, turn.completion.token_ids, reply)
        return Status.TRUNCATED, f"the episode was not over after {max_turns} turns"

    def _recent(self, num_turns: int) -> Iterator[Message]:
        """The messages of the last `num_turns` turns."""
        for turn in self.turns[-num_turns:]:
            yield Message(role="assistant", content=turn.text)
            yield from turn.reply

    async def _turn(self, prompt_ids: tuple[int, ...], turn_index: int, state: str | None, shown: tuple[Message, ...]) -> Turn:
        sampling = replace(
            self._sampling,
            seed=stable_seed(self._sampling.seed, turn_index),
            stop_token_ids=self._stops,
            max_tokens=min(self._sampling.max_tokens, self._max_total_tokens - len(prompt_ids)),
        )
        request = Request(
            id=f"{self._id}.{turn_index}", prompt_ids=prompt_ids, sampling=sampling, num_routed=self._num_routed(prompt_ids)
        )
        completion = await self._generate(request)
        text = self._renderer.decode(completion.token_ids)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text, shown=shown, state=state)
        self.turns.append(turn)
        return turn

    def _num_routed(self, prompt_ids: tuple[int, ...]) -> int:
        """Leading tokens of a prompt whose expert choices earlier turns reported: all up to the last token that was read."""
        if not self.turns or self.turns[-1].completion.routes is None:
            return 0
        before = (*self.turns[-1].prompt_ids, *self.turns[-1].completion.token_ids)
        return len(before) - 1 if prompt_ids[: len(before)] == before else 0


async def _close(env: AsyncEnv, id: str) -> None:
    try:
        await env.close()
    except EnvError as error:
        # The sample is complete, and this must not replace a cancellation under way.
        _log.warning("sample %s: its environment did not close: %s", id, error)


Episode = Callable[[Prompt, str, int], Awaitable[Trajectory]]
"""(prompt, sample id, sample seed) -> its trajectory. An EnvError fails the sample; after an EnvLost it is played again; any
other exception stops the run."""

MAX_REPLAYS = 3
"""Limit per sample: an environment that always kills its process must fail in the end."""


async def replayed(
    episode: Episode, prompt: Prompt, id: str, seed: int, *, on_lost: Callable[[str], None] = lambda reason: None
) -> Trajectory:
    """Run `episode`, again with the same seed if its environment is lost; `on_lost` gets the reason each time.

    Under the same weights it draws the same tokens again. The reason of a sample that fails says how often it was lost.
    """
    num_lost = 0
    while True:
        try:
            return await episode(prompt, id, seed)
        except EnvLost as error:
            if num_lost == MAX_REPLAYS:
                return _failed(id, f"{error}, each of the {num_lost + 1} times it was played")
            num_lost += 1
            on_lost(str(error))
        except EnvError as error:
            return _failed(id, str(error))


def _failed(id: str, reason: str) -> Trajectory:
    return Trajectory(id=id, turns=(), status=Status.FAILED, reason=reason)
