"""Gymnasium behind the Env seam."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import gymnasium
from gymnasium import spaces

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll_zoo.adapters.config import GymnasiumConfig
from reroll_zoo.adapters.gymnasium import Gymnasium, action_reader, show, without_colours
from reroll_zoo.vision.parts import opened
from reroll_zoo.vision.store import MARK, PICTURES

TAXI = max(env_id for env_id in gymnasium.registry if env_id.startswith("Taxi-"))

LAKE: dict[str, Any] = {
    "env_id": "FrozenLake-v1",
    "options": {"is_slippery": False},
    "action_names": ["left", "down", "right", "up"],
}


class Corridor(gymnasium.Env):  # type: ignore[type-arg]
    """Walk from 0 to 2 to be paid; shows a dict, takes two numbers of which the first is the move."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = spaces.Dict({"place": spaces.Discrete(5), "speed": spaces.Box(-1, 1, (2,))})
    action_space = spaces.MultiDiscrete([2, 3])

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> Any:
        picture = np.zeros((6, 20, 3), dtype=np.uint8)
        picture[:, 4 * self.place : 4 * self.place + 4] = (250, 20, 20)
        return picture if self.render_mode == "rgb_array" else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.place += int(action[0])
        return self.seen(), float(self.place == 2), self.place == 2, False, {}

    def seen(self) -> dict[str, Any]:
        return {"place": self.place, "speed": np.array([0.126, -0.001], dtype=np.float32)}


gymnasium.register("CorridorForTests-v0", entry_point=Corridor)


def play(env: Gymnasium, actions: list[str], *, seed: int = 0) -> list[StepResult]:
    """What comes of the actions, up to the end of the episode."""
    env.reset(seed)
    outcomes: list[StepResult] = []
    for action in actions:
        outcomes.append(env.step(action))
        if not outcomes[-1].messages:
            break
    return outcomes


def test_a_named_action_moves_and_a_wall_has_no_effect() -> None:
    env = Gymnasium(GymnasiumConfig(**LAKE))
    rules, first = env.reset(0)
    assert rules == {
        "role": "system",
        "content": "You play FrozenLake-v1. Answer with one of: left, down, right, up.",
    }
    assert first == {"role": "user", "content": "0"}
    bumped = env.step("Left.")
    assert (bumped.info["effective"], bumped.state, bumped.messages[0]["content"]) == (0.0, "0", "0")
    moved = env.step(" DOWN ")
    assert (moved.info["effective"], moved.state) == (1.0, "4")


def test_reaching_the_goal_is_a_success_that_terminates() -> None:
    env = Gymnasium(GymnasiumConfig(**LAKE))
    end = play(env, ["down", "down", "right", "right", "down", "right"])[-1]
    assert (end.reward, end.terminated, end.truncated, end.messages) == (1.0, True, False, ())
    assert end.info["success"] == 1.0
    with pytest.raises(EnvError, match="reset"):
        env.step("down")


def test_a_hole_terminates_without_success() -> None:
    end = play(Gymnasium(GymnasiumConfig(**LAKE)), ["down", "right"])[-1]
    assert (end.terminated, end.reward, end.info["success"]) == (True, 0.0, 0.0)


def test_max_steps_truncates_and_does_not_terminate() -> None:
    end = play(Gymnasium(GymnasiumConfig(**LAKE, max_steps=2)), ["left", "left"])[-1]
    assert (end.terminated, end.truncated, end.info["success"]) == (False, True, 0.0)


def test_a_repeated_decision_earns_the_sum_of_its_steps_and_stops_at_the_end() -> None:
    env = Gymnasium(GymnasiumConfig(env_id="CartPole-v1", action_names=["left", "right"], repeat=5))
    one_by_one = play(Gymnasium(GymnasiumConfig(env_id="CartPole-v1")), ["0"] * 15)
    assert 10 < len(one_by_one) < 15
    first, _, end = play(env, ["left"] * 3)
    assert (first.reward, first.state) == (5.0, one_by_one[4].state)
    assert (end.reward, end.terminated, end.state) == (len(one_by_one) - 10, True, one_by_one[-1].state)
    assert end.info["success"] == 0.0  # the reward threshold of CartPole is a sum of 475


def test_cart_pole_shows_named_rounded_numbers() -> None:
    names = ["position", "velocity", "angle", "turning"]
    _, first = Gymnasium(GymnasiumConfig(env_id="CartPole-v1", observation_names=names, digits=3)).reset(1)
    lines = dict(line.split(": ") for line in first["content"].splitlines())
    assert list(lines) == names
    assert all(len(number.split(".")[1]) == 3 for number in lines.values())


def test_equal_seeds_give_equal_episodes_and_other_seeds_others() -> None:
    def shown(seed: int) -> list[str | None]:
        env = Gymnasium(
            GymnasiumConfig(
                env_id="FrozenLake-v1", options={"is_slippery": True, "map_name": "8x8"}, action_names=LAKE["action_names"]
            )
        )
        return [outcome.state for outcome in play(env, ["right", "down"] * 4, seed=seed)]

    assert shown(2**62) == shown(2**62)
    assert len({tuple(shown(seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("words", ["0.5", "[0.5]", "( 0.5 )", "5e-1"])
def test_pendulum_takes_a_number(words: str) -> None:
    env = Gymnasium(GymnasiumConfig(env_id="Pendulum-v1"))
    rules, _ = env.reset(0)
    assert rules["content"].endswith("Answer with a number from -2 to 2.")
    outcome = env.step(words)
    assert outcome.reward < 0
    assert not outcome.terminated


def test_pendulum_is_cut_by_its_own_limit() -> None:
    end = play(Gymnasium(GymnasiumConfig(env_id="Pendulum-v1", repeat=50)), ["0"] * 4)[-1]
    assert (end.truncated, end.terminated, end.info["success"]) == (True, False, 0.0)


def test_mountain_car_continuous_can_be_won_by_words() -> None:
    env = Gymnasium(
        GymnasiumConfig(env_id="MountainCarContinuous-v0", observation_names=["position", "velocity"], digits=4, repeat=4)
    )
    shown = env.reset(3)[1]["content"]
    end = None
    while end is None or not (end.terminated or end.truncated):
        end = env.step("0.8" if "velocity: -" not in shown else "-0.8")
        shown = end.state or ""
    assert (end.terminated, end.info["success"]) == (True, 1.0)
    assert end.reward > 90


@pytest.mark.parametrize(
    ("words", "why"), [("2.5", "out of range"), ("nan", "no action"), ("1, 1", "no action"), ("push", "no action")]
)
def test_bad_numbers_are_invalid_and_say_the_range(words: str, why: str) -> None:
    env = Gymnasium(GymnasiumConfig(env_id="Pendulum-v1"))
    first = env.reset(0)
    with pytest.raises(InvalidAction, match=rf"{why}.*from -2 to 2"):
        env.step(words)
    undisturbed = Gymnasium(GymnasiumConfig(env_id="Pendulum-v1"))
    assert undisturbed.reset(0) == first
    assert undisturbed.step("0") == env.step("0")


def test_an_unknown_word_is_invalid_and_lists_the_actions() -> None:
    env = Gymnasium(GymnasiumConfig(**LAKE))
    env.reset(0)
    with pytest.raises(InvalidAction, match=r"'jump' is no action here. Answer with one of: left, down, right, up"):
        env.step("jump")
    with pytest.raises(InvalidAction, match="…"):
        env.step("up " * 500)


def test_discrete_actions_without_names_are_numbers() -> None:
    env = Gymnasium(GymnasiumConfig(env_id=TAXI))
    assert env.reset(0)[0]["content"].endswith("Answer with a number from 0 to 5.")
    assert env.step("1").reward == -1.0
    with pytest.raises(InvalidAction):
        env.step("6")


def test_several_whole_numbers_and_a_dict_to_see() -> None:
    env = Gymnasium(GymnasiumConfig(env_id="CorridorForTests-v0"))
    rules, first = env.reset(0)
    assert rules["content"].endswith("Answer with 2 whole numbers in brackets, such as [0, 0]: from 0 to 1; from 0 to 2.")
    assert first["content"] == "place: 0\nspeed: 0.13 0.00"
    with pytest.raises(InvalidAction):
        env.step("[0.5, 1]")
    assert env.step("[1, 2]").state == "place: 1\nspeed: 0.13 0.00"
    end = env.step("1 0")
    assert (end.terminated, end.info["success"]) == (True, 1.0)  # no threshold is known: an end that pays


def test_success_at_overrules_the_threshold() -> None:
    assert play(Gymnasium(GymnasiumConfig(**LAKE, success_at=0.0)), ["down", "right"])[-1].info["success"] == 1.0


def test_a_picture_keeps_where_the_player_is() -> None:
    env = Gymnasium(GymnasiumConfig(**LAKE, ansi=True))
    assert env.reset(0)[1]["content"] == "<red S>FFF\nFHFH\nFFFH\nHFFG"
    assert env.step("right").messages[0]["content"] == "  (Right)\nS<red F>FF\nFHFH\nFFFH\nHFFG"


def test_nested_colours_and_stray_codes_become_plain_text() -> None:
    assert without_colours("\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m|\x1b[1mbold\x1b[0m \x1b[35mx") == "<blue <yellow R>>|bold x"


def test_a_taxi_picture_tells_taxi_passenger_and_goal_apart() -> None:
    shown = Gymnasium(GymnasiumConfig(env_id=TAXI, ansi=True)).reset(1)[1]["content"]
    assert "\x1b" not in shown
    assert all(colour in shown for colour in ("<yellow ", "<blue ", "<magenta "))


def test_an_environment_shows_the_pictures_that_it_draws() -> None:
    env = Gymnasium(GymnasiumConfig(env_id="CorridorForTests-v0", rgb_array=True))
    rules, first = env.reset(0)
    assert "images" not in rules
    outcome = env.step("[1, 0]")
    for place, message in enumerate((first, *outcome.messages)):
        picture = np.asarray(opened(PICTURES.find(PICTURES.read(message["images"][0]))))
        assert message["content"] == MARK
        assert picture.shape == (6, 20, 3)
        assert {*np.flatnonzero(picture[0, :, 0])} == {*range(4 * place, 4 * place + 4)}
    assert outcome.state == env.step("[0, 0]").state, "where the same is seen is the same state"
    assert outcome.state != env.step("[1, 0]").state


def test_text_and_picture_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="set one of them"):
        GymnasiumConfig(env_id="CorridorForTests-v0", ansi=True, rgb_array=True)


def test_discrete_states_can_have_names() -> None:
    assert show(2, spaces.Discrete(3), names=["cold", "warm", "hot"], digits=2) == "hot"
    assert show(
        (1, np.zeros((2, 2), np.int8)), spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary([2, 2])]), names=None, digits=2
    ) == ("1\n0 0\n0 0")


def test_discrete_actions_may_start_elsewhere_than_at_0() -> None:
    reader = action_reader(spaces.Discrete(2, start=5), names=["a", "b"])
    assert (reader.read("a"), reader.read("B")) == (5, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "NoSuchThing-v0"}, "cannot make NoSuchThing-v0"),
        ({"env_id": "CartPole-v1", "action_names": ["left"]}, "1 names for 2 actions"),
        ({"env_id": "CartPole-v1", "action_names": ["left", "Left"]}, "a name twice"),
        ({"env_id": "Pendulum-v1", "action_names": ["left"]}, "is for discrete actions"),
        ({"env_id": "CartPole-v1", "observation_names": ["x"]}, "1 names for the 4 values"),
        ({"env_id": "CorridorForTests-v0", "observation_names": ["x"]}, "leave it out"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gymnasium(GymnasiumConfig(**options))


def test_actions_without_simple_words_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read from text"):
        action_reader(spaces.MultiBinary(3), names=None)


def played(env, seed):
    """An episode of a fixed walk, as text."""
    shown = [str(env.reset(seed))]
    for turn in range(30):
        outcome = env.step(str(turn % 4))
        shown.append(f"{outcome.messages} {outcome.reward} {outcome.state}")
        if outcome.terminated or outcome.truncated:
            break
    env.close()
    return shown


def test_an_environment_that_served_before_plays_as_a_new_one():
    options = {"env_id": "FrozenLake-v1", "options": {"is_slippery": True, "map_name": "8x8"}}
    new = [played(Gymnasium(GymnasiumConfig(**options, fresh=True)), seed) for seed in range(6)]
    assert [played(Gymnasium(GymnasiumConfig(**options)), seed) for seed in range(6)] == new
    first, second = Gymnasium(GymnasiumConfig(**options)), Gymnasium(GymnasiumConfig(**options))
    assert first.env is not second.env
    assert played(second, 3) == new[3]
    third = Gymnasium(GymnasiumConfig(**options))
    assert third.env is second.env
    assert played(third, 5) == new[5]
    assert played(first, 4) == new[4]


def test_an_environment_that_raised_or_is_closed_twice_does_not_serve_again():
    options = {"env_id": "CartPole-v1", "max_steps": 17}
    broken = Gymnasium(GymnasiumConfig(**options))
    broken.reset(0)
    broken.env.unwrapped.step = None
    with pytest.raises(TypeError):
        broken.step("0")
    broken.close()
    sound = Gymnasium(GymnasiumConfig(**options))
    assert sound.env is not broken.env
    sound.reset(0)
    sound.close()
    sound.close()
    first, second = Gymnasium(GymnasiumConfig(**options)), Gymnasium(GymnasiumConfig(**options))
    assert first.env is sound.env
    assert second.env is not sound.env
