import json

import pytest
from episode_fakes import decode_bytes, play, user
from hypothesis import given
from hypothesis import strategies as st

from reroll.errors import RunFolderError, printable
from reroll.types import Message, Prompt, Status
from reroll_zoo.samples.episode import pieces_of, shade
from reroll_zoo.samples.folders import find_run


def test_an_episode_is_seen_as_it_was_played():
    episode = play(
        {"said": ["go ", "Up"], "logp": [-0.12345, -2.0], "shown": "P G", "reward": -0.1, "info": {"effective": 1.0}},
        {"said": ["Down"], "shown": "_ P", "reward": 1.0, "info": {"success": 1.0}, "state": "s1"},
        reward_parts={"success": 1.0},
    )
    first, second = episode.turns
    assert [told.content for turn in episode.turns for told in turn.shown] == ["P G", "_ P"]
    assert [(token.text, token.logp, token.version) for token in first.tokens] == [("go ", -0.1235, 0), ("Up", -2.0, 0)]
    assert (second.reward, second.info, second.state, second.finish_reason) == (1.0, {"success": 1.0}, "s1", "stop")
    assert (episode.step, episode.prompt_id, episode.domain, episode.seed) == (3, "lake/7", "lake", 7)
    assert (episode.success, episode.reward, episode.num_tokens) == (True, 0.9, 3)


def test_a_prompt_of_its_own_is_logged_as_it_is():
    prompt = Prompt(id="math/1", messages=(user("1+1?"),), domain="math", answer="2", extra={"seed": "blue"})
    row = play({"said": ["2"], "shown": (Message(role="system", content="think"), user("1+1?"))}, prompt=prompt)
    assert (row.prompt, row.answer, row.seed) == ("1+1?", "2", None)


def test_several_turns_read_as_a_dialogue():
    turns = [{"said": ["3"], "reply": (user("wrong, again"),)}, {"said": ["2"]}]
    assert play(*turns, reward=float("nan"), reason="max_tokens").completion == (
        "[assistant] 3\n\n[user] wrong, again\n\n[assistant] 2"
    )


def test_tools_are_named_where_they_are_offered():
    tools = [{"type": "function", "function": {"name": name}} for name in ("search", "add")]
    episode = play({"said": ["hm"], "shown": (Message(role="user", content="1+1?", tools=tools),)})
    assert episode.turns[0].shown[0].tools == ("search", "add")


def test_a_turn_whose_history_was_cut_says_so():
    episode = play({"said": ["a"]}, {"said": ["b"]}, {"said": ["c"], "prompt_ids": (0, 8)})
    assert [turn.is_rendered_afresh for turn in episode.turns] == [False, False, True]


def test_tokens_know_the_weights_that_wrote_them():
    episode = play({"said": ["a", "b", "c"], "versions": ((3, 1), (5, 2))})
    assert [token.version for token in episode.turns[0].tokens] == [3, 5, 5]


def test_an_environments_prompt_is_its_opening():
    assert play({"said": ["Up"], "shown": "P G"}).prompt == "P G"


def test_numbers_that_json_cannot_say_are_null_there():
    episode = play({"said": ["a"], "logp": [-float("inf")], "info": {"x": float("nan")}}, reward=float("nan"))
    row = json.loads(episode.model_dump_json())
    assert (row["reward"], row["turns"][0]["logp"], row["turns"][0]["info"]) == (None, [None], {"x": None})


def test_an_episode_that_never_began_can_be_seen_too():
    episode = play(status=Status.FAILED, reason="no room")
    assert (episode.turns, episode.success, episode.prompt) == ((), None, "")


@pytest.mark.parametrize(
    ("info", "parts", "success"),
    [({"success": 0.0}, {"success": 1.0}, False), ({}, {"success": 1.0}, True), ({"effective": 1.0}, {}, None)],
)
def test_success_is_what_the_environment_says_else_the_reward(info, parts, success):
    assert play({"said": ["a"], "info": info}, reward_parts=parts).success is success


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    assert pieces_of("a€!".encode(), decode_bytes) == ["a", "", "", "€", "!"]


@given(st.text(st.characters(exclude_characters="�", codec="utf-8")))
def test_the_pieces_make_up_the_text(text):
    assert "".join(pieces_of(text.encode(), decode_bytes)) == text


def test_bytes_that_are_no_character_stay_visible():
    assert pieces_of([0xE2, 0x41, 0xE2], decode_bytes) == ["�", "A", "�"]


def test_a_space_that_a_decoder_drops_at_the_start_is_kept():
    words = {1: "▁the", 2: "▁cat", 3: "s"}

    def decode(ids):
        return "".join(words[id] for id in ids).replace("▁", " ").removeprefix(" ")

    assert pieces_of([1, 2, 3], decode) == [" the", " cat", "s"]


def test_a_run_is_found_by_its_folder_or_by_its_name(tmp_path):
    (tmp_path / "runs" / "lake").mkdir(parents=True)
    assert find_run(str(tmp_path / "runs" / "lake")) == tmp_path / "runs" / "lake"
    assert find_run("lake", runs_dir=tmp_path / "runs") == tmp_path / "runs" / "lake"


def test_an_unknown_run_names_those_that_are_close(tmp_path):
    (tmp_path / "frozen-lake").mkdir()
    with pytest.raises(RunFolderError, match=r"no run 'frozen_lake'.*did you mean frozen-lake\?"):
        find_run("frozen_lake", runs_dir=tmp_path)
    with pytest.raises(RunFolderError, match="give the folder of a run"):
        find_run("zzz", runs_dir=tmp_path / "nowhere")


def test_control_characters_become_pictures():
    assert printable("a\x1b[31m\r\x9b\x7f\n\té") == "a␛[31m␍�␡\n\té"


def test_shades_follow_the_probability_of_a_token():
    assert [shade(logp) for logp in (0.0, -0.2, -1.0, -3.0, -9.0, None)] == [0, 1, 2, 3, 4, 4]
