import io
from pathlib import Path

from episode_fakes import play
from rich.console import Console

from reroll.types import Message, Status
from reroll_zoo.show.terminal import SHADES, print_episode, print_samples

BOARD = "P _ _\n_ O G"


def printed(show, *args, is_terminal=False, **options):
    colours = "truecolor" if is_terminal else None
    console = Console(file=io.StringIO(), width=100, force_terminal=is_terminal, color_system=colours, highlight=False)
    show(console, *args, **options)
    return console.file.getvalue()


def test_samples_are_listed_with_what_became_of_them():
    won = play({"said": ["Up"], "info": {"success": 1.0}}, {"said": ["Up"], "reward": 0.5, "info": {"success": 1.0}})
    lost = play({"said": ["Up"], "info": {"success": 0.0}}, id="12.1", status=Status.TRUNCATED)
    dropped = play({"said": ["Left"]}, id="13.0").model_copy(update={"step": None, "fate": "filtered"})
    text = printed(print_samples, [won, lost, dropped], folder=Path("runs/lake"), num_ended=9)
    rows = [line.replace("│", " ").split() for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["3", "12.0", "lake", "completed", "2", "0.5", "✓", "Up"],
        ["3", "12.1", "lake", "truncated", "1", "0", "✗", "Up"],
        ["–", "13.0", "lake", "filtered", "1", "0", "Left"],
    ]
    assert "3 of 9 samples" in text


def test_an_episode_is_printed_turn_by_turn():
    told = (Message(role="system", content="Reach G."), Message(role="user", content=BOARD))
    episode = play(
        {"said": ["go ", "Right"], "shown": told, "reward": -0.1, "info": {"effective": 1.0}, "versions": ((3, 1), (4, 1))},
        {"said": ["Down"], "shown": "_ P _\n_ O G", "reward": 1.0, "prompt_ids": (5,)},
        reward_parts={"success": 1.0},
    )
    text = printed(print_episode, episode)
    parts = [
        "sample 12.0 · step 3",
        "seed 7",
        "turn 1",
        f"system\nReach G.\nuser\n{BOARD}\npolicy\ngo Right\nreward -0.1  effective 1 · weights v3 → v4 · stop",
        "turn 2",
        "does not continue",
        "_ P _\n_ O G\npolicy\nDown\nreward 1",
        "\nreward 0.9  success 1",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_surprising_tokens_are_shaded_and_certain_ones_are_not():
    episode = play({"said": ["sure", "what", "\n"], "logp": [0.0, -9.0, -1.0]})
    text = printed(print_episode, episode, is_terminal=True)
    colours = [[int(SHADES[place][-6:][at : at + 2], 16) for at in (0, 2, 4)] for place in (4, 2)]
    surprising, unsure = (";".join(map(str, colour)) for colour in colours)
    line = next(line for line in text.splitlines() if "sure" in line)
    assert line.startswith("sure\x1b[")
    assert f"48;2;{surprising}mwhat" in line
    assert f"48;2;{unsure}m↵" in line


def test_what_a_model_writes_cannot_steer_the_terminal():
    episode = play({"said": ["\x1b[2J", "[red]x[/red]"], "shown": "\x1b]0;title\x07", "reward": 1.0}, reason="\x1b[0m")
    text = printed(print_episode, episode)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "␛[2J[red]x[/red]" in text


def test_a_sample_that_was_never_played_shows_why():
    text = printed(print_episode, play(status=Status.FAILED, reason="the prompt has more than 2 tokens"))
    assert "reason the prompt has more than 2 tokens" in text
    assert "no turn was played" in text
