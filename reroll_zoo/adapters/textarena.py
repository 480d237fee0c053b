"""TextArena: its games for one player."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import textarena
from textarena.wrappers import ActionFormattingWrapper

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll.types import Message
from reroll_zoo.adapters.config import TextArenaConfig
from reroll_zoo.adapters.global_random import GlobalRandom

PLAYER = 0
"""The only player's id in a game."""


class TextArena:
    """A single-player game. Its messages are shown as they come; the rules come first.

    A move that the game refuses is an InvalidAction and leaves the game as it was: its own count of errors in a row, which
    would end it, is not used. The reward is the game's, paid at its end; 1 is a success.
    """

    def __init__(self, options: TextArenaConfig) -> None:
        self._env_id = options.env_id
        self._random = GlobalRandom(0)
        with self._asking():
            wrapped = textarena.make(options.env_id, **options.options)
        formats_actions = isinstance(wrapped, textarena.Wrapper) and wrapped.is_wrapped_with(ActionFormattingWrapper)
        game = wrapped
        while isinstance(game, textarena.Wrapper):
            game = game.env
        # The other default wrappers repeat the whole conversation, which the policy has before it anyway.
        self._game = ActionFormattingWrapper(game) if formats_actions else game
        self._is_under_way = False

    def reset(self, seed: int) -> tuple[Message, ...]:
        """The game of this seed: its rules and first messages as one user message."""
        self._random = GlobalRandom(seed)
        with self._asking():
            self._game.reset(num_players=1, seed=seed)
            if not isinstance(self._game.state, textarena.SinglePlayerState):
                raise EnvError(f"{self._env_id} is a game for several players: choose one for a single player")
            shown = self._new_messages()
        self._is_under_way = True
        return ({"role": "user", "content": shown},)

    def step(self, action: str) -> StepResult:
        """Make one move. Square brackets around it may be left out where the game allows it."""
        if not self._is_under_way:
            raise EnvError("no game is under way: call reset, which starts one")
        state = self._game.state
        with self._asking():
            is_over, _ = self._game.step(action)
            shown = self._new_messages()
        if not is_over and state.error_count:
            state.error_count = 0
            raise InvalidAction(shown)
        if not is_over:
            return StepResult(messages=({"role": "user", "content": shown},), info={"effective": 1.0})
        self._is_under_way = False
        rewards, game_info = self._game.close()
        reward = float(rewards[PLAYER])
        reached_limit = "turn limit" in str(game_info[PLAYER].get("reason", "")).lower()
        success = float(reward >= 1.0)
        info = {"effective": float(not game_info[PLAYER]["invalid_move"]), "success": success}
        return StepResult(reward=reward, terminated=not reached_limit, truncated=reached_limit, info=info)

    def close(self) -> None:
        """Leave the game."""
        self._is_under_way = False

    def _new_messages(self) -> str:
        """What the game has said since it was last asked, without what the player said."""
        _, messages = self._game.get_observation()
        return "\n".join(text.strip() for sender, text, _ in messages if sender == textarena.GAME_ID)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Runs the library with this game's randomness. Whatever it raises becomes an EnvError that says what to do."""
        try:
            with self._random.in_place():
                yield
        except EnvError:
            raise
        except LookupError as error:
            fix = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
            raise EnvError(f"{self._env_id} needs NLTK's word lists, which are not on this machine: {fix}") from error
        except Exception as error:
            raise EnvError(f"TextArena's {self._env_id} failed: {type(error).__name__}: {error}") from error
