"""Random ragged episodes, both as the flat tensors under test and as nested lists that a reference can loop over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from reroll.algo.episodes import Episodes


@dataclass
class Token:
    penalty: float
    value: float
    score_norm: float


@dataclass
class Turn:
    reward: float
    """Before the penalties of its tokens."""
    state: int
    tokens: list[Token]

    @property
    def net(self) -> float:
        return self.reward - sum(token.penalty for token in self.tokens)


@dataclass
class Episode:
    group: int
    turns: list[Turn]
    unwritten_reward: float = 0.0
    """What an episode without turns earned."""
    parts: dict[str, float] = field(default_factory=dict)
    baseline: float = 0.0

    @property
    def gross(self) -> float:
        return self.unwritten_reward + sum(turn.reward for turn in self.turns)

    @property
    def reward(self) -> float:
        return self.unwritten_reward + sum(turn.net for turn in self.turns)

    @property
    def tokens(self) -> list[Token]:
        return [token for turn in self.turns for token in turn.tokens]

    @property
    def token_rewards(self) -> list[float]:
        """A turn's reward on its last token, less each token's penalty."""
        return [
            (turn.reward if place == len(turn.tokens) - 1 else 0.0) - token.penalty
            for turn in self.turns
            for place, token in enumerate(turn.tokens)
        ]


@dataclass
class Case:
    episodes: list[Episode]
    layout: list[tuple[int, int, int] | None]
    """Of each packed token: its episode, turn and place in the turn; None for a token nobody wrote."""

    def siblings(self, episode: Episode) -> list[Episode]:
        return [other for other in self.episodes if other.group == episode.group]

    def expect(self, advantage: Callable[[Episode, int, int], float]) -> np.ndarray:
        """[T] from a function of the episode, the turn and the place of the token in the turn."""
        return np.array([0.0 if at is None else advantage(self.episodes[at[0]], at[1], at[2]) for at in self.layout])

    def flat(self, *, running_mean: float = 0.0, running_std: float = 0.0) -> Episodes:
        turns = [(number, turn) for number, episode in enumerate(self.episodes) for turn in episode.turns]
        place = {id(turn): index for index, (_, turn) in enumerate(turns)}

        def per_token(name: str) -> torch.Tensor:
            # 9 where nobody wrote: an estimator that reads it is caught.
            read = [9.0 if at is None else getattr(self._turn(at).tokens[at[2]], name) for at in self.layout]
            return floats(read)

        return Episodes(
            group=ints([episode.group for episode in self.episodes]),
            reward=floats([episode.reward for episode in self.episodes]),
            turn_episode=ints([number for number, _ in turns]),
            turn_reward=floats([turn.net for _, turn in turns]),
            turn_state=ints([turn.state for _, turn in turns]),
            token_turn=ints([-1 if at is None else place[id(self._turn(at))] for at in self.layout]),
            parts={
                name: floats([episode.parts[name] for episode in self.episodes])
                for name in (self.episodes[0].parts if self.episodes else ())
            },
            baseline=floats([episode.baseline for episode in self.episodes]),
            running_mean=running_mean,
            running_std=running_std,
            penalty=per_token("penalty"),
            value=per_token("value"),
            score_norm=per_token("score_norm"),
        )

    def _turn(self, at: tuple[int, int, int]) -> Turn:
        return self.episodes[at[0]].turns[at[1]]


def floats(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def random_case(seed: int, *, max_turns: int = 3, penalised: bool = True, all_written: bool = False) -> Case:
    """Groups of one to five, their episodes interleaved, one group of equal rewards; one episode without a token, unless
    all are written."""
    rng = np.random.default_rng(seed)

    def token() -> Token:
        penalty = rng.normal() / 10 if penalised else 0.0
        return Token(penalty=penalty, value=rng.normal(), score_norm=rng.uniform(0.01, 2))

    def turn(reward: float) -> Turn:
        return Turn(reward=reward, state=int(rng.integers(3)), tokens=[token() for _ in range(rng.integers(1, 5))])

    def episode(group: int) -> Episode:
        outcome = float(rng.choice([0.0, 1.0, -1.0, rng.normal()]))
        turns = [turn(rng.normal() / 3) for _ in range(rng.integers(max_turns))] + [turn(outcome)]
        return Episode(group, turns, parts={"form": float(rng.integers(2)), "taste": rng.normal()}, baseline=rng.normal())

    members = [group for group in range(4) for _ in range(rng.integers(1, 6))]
    episodes = [episode(group) for group in rng.permutation(members).tolist()]
    if not all_written:
        unwritten = Episode(0, [], unwritten_reward=1.0, parts={"form": 1.0, "taste": 0.0})
        episodes.insert(int(rng.integers(len(episodes) + 1)), unwritten)
    equal = [Episode(4, [Turn(0.1, 0, [Token(0.0, 0.0, 1.0)] * 2)], parts={"form": 0.1, "taste": 0.1}) for _ in range(3)]
    return Case(episodes + equal, _layout(episodes + equal, rng))


def case_of(*groups: list[float]) -> Case:
    """Episodes of one turn of two tokens with these rewards, and a token nobody wrote before each."""
    episodes = [
        Episode(number, [Turn(reward, 0, [Token(0.0, 0.0, 1.0), Token(0.0, 0.0, 1.0)])])
        for number, rewards in enumerate(groups)
        for reward in rewards
    ]
    return Case(episodes, [at for number in range(len(episodes)) for at in (None, (number, 0, 0), (number, 0, 1))])


def _layout(episodes: list[Episode], rng: np.random.Generator) -> list[tuple[int, int, int] | None]:
    layout: list[tuple[int, int, int] | None] = []
    for number, episode in enumerate(episodes):
        layout += [None] * int(rng.integers(1, 4))  # the prompt
        for order, turn in enumerate(episode.turns):
            for place in range(len(turn.tokens)):
                layout += [None] * int(rng.integers(2)) + [(number, order, place)]
    return [*layout, None]
