import json

import pytest
from episode_fakes import OLD_ROW, decode_bytes, play, user
from hypothesis import given
from hypothesis import strategies as st

from reroll.errors import RunFolderError
from reroll.observe.episode import LoggedEpisode, pieces_of
from reroll.observe.files import append_jsonl
from reroll.types import Message, Prompt, Status
from reroll_zoo.episodes import find_episode, find_run, logged_episodes, printable, read_episodes, shade, tokens_of


def log(folder, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        append_jsonl(folder / "samples.jsonl", row.model_dump() if isinstance(row, LoggedEpisode) else row)
    return folder / "samples.jsonl"


def test_an_episode_is_read_as_it_was_written(tmp_path):
    episode = play(
        {"said": ["go ", "Up"], "logp": [-0.12345, -2.0], "shown": "P G", "reward": -0.1, "info": {"effective": 1.0}},
        {"said": ["Down"], "shown": "_ P", "reward": 1.0, "info": {"success": 1.0}, "state": "s1"},
        reward_parts={"success": 1.0},
    )
    assert read_episodes(log(tmp_path, episode)) == ([episode], [])
    first, second = episode.turns
    assert [told.content for turn in episode.turns for told in turn.shown] == ["P G", "_ P"]
    assert [(token.text, token.logp, token.version) for token in tokens_of(first)] == [("go ", -0.1235, 0), ("Up", -2.0, 0)]
    assert (second.reward, second.info, second.state, second.finish_reason) == (1.0, {"success": 1.0}, "s1", "stop")
    assert (episode.step, episode.prompt_id, episode.domain, episode.seed) == (3, "lake/7", "lake", 7)
    assert (episode.success, episode.reward, episode.num_tokens) == (True, 0.9, 3)


def test_every_key_of_an_older_log_is_still_written():
    row = play({"said": ["Up"], "shown": "P G"}).model_dump()
    assert set(OLD_ROW) < set(row)
    assert row["prompt"] == "P G"  # An environment's prompt says nothing itself: its opening stands there.


def test_a_prompt_of_its_own_is_logged_as_it_is():
    prompt = Prompt(id="math/1", messages=(user("1+1?"),), domain="math", answer="2", extra={"seed": "blue"})
    row = play({"said": ["2"], "shown": (Message(role="system", content="think"), user("1+1?"))}, prompt=prompt)
    assert (row.prompt, row.answer, row.seed) == ("1+1?", "2", None)


def test_tools_are_named_where_they_are_offered():
    tools = [{"type": "function", "function": {"name": name}} for name in ("search", "add")]
    episode = play({"said": ["hm"], "shown": (Message(role="user", content="1+1?", tools=tools),)})
    assert episode.turns[0].shown[0].tools == ("search", "add")


def test_a_turn_whose_history_was_cut_says_so():
    episode = play({"said": ["a"]}, {"said": ["b"]}, {"said": ["c"], "prompt_ids": (0, 8)})
    assert [turn.is_rendered_afresh for turn in episode.turns] == [False, False, True]


def test_tokens_know_the_weights_that_wrote_them():
    episode = play({"said": ["a", "b", "c"], "versions": ((3, 1), (5, 2))})
    assert [token.version for token in tokens_of(episode.turns[0])] == [3, 5, 5]


def test_numbers_that_json_cannot_say_read_as_none(tmp_path):
    episode = play({"said": ["a"], "logp": [-float("inf")], "info": {"x": float("nan")}}, reward=float("nan"))
    [read], _ = read_episodes(log(tmp_path, episode))
    assert (read.reward, read.turns[0].logp, read.turns[0].info) == (None, (None,), {"x": None})


def test_an_episode_that_never_began_is_logged_too(tmp_path):
    episode = play(status=Status.FAILED, reason="no room")
    assert read_episodes(log(tmp_path, episode))[0] == [episode]
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


def test_a_log_without_turns_still_reads(tmp_path):
    [old], notes = read_episodes(log(tmp_path, OLD_ROW))
    assert (old.turns, notes, old.success) == (None, [], None)
    [words] = old.exchanges
    assert (words.shown[0].content, words.text, tokens_of(words), words.reward) == ("1+1?", "It is 2.", [], 1.0)


def test_damaged_lines_are_skipped_with_a_note(tmp_path):
    good = play({"said": ["a"]})
    torn = good.model_dump() | {"id": "bad"}
    torn["turns"] = [torn["turns"][0] | {"logp": []}]
    path = log(tmp_path, good, {"step": 1}, torn, good)
    with path.open("ab") as file:
        file.write(b'{"step": 4, "id": "\xff\n' + json.dumps(OLD_ROW).encode()[:40])
    episodes, notes = read_episodes(path)
    assert episodes == [good, good]
    assert [note.split(" is damaged and was skipped: ")[0] for note in notes] == [f"{path} line {n}" for n in (2, 3, 5, 6)]
    assert "different numbers of tokens" in notes[1]


def test_a_run_is_found_by_its_folder_or_by_its_name(tmp_path):
    log(tmp_path / "runs" / "lake", OLD_ROW)
    assert find_run(str(tmp_path / "runs" / "lake")) == tmp_path / "runs" / "lake"
    assert find_run("lake", runs_dir=tmp_path / "runs") == tmp_path / "runs" / "lake"


def test_an_unknown_run_names_those_that_are_close(tmp_path):
    log(tmp_path / "frozen-lake")
    with pytest.raises(RunFolderError, match=r"no run 'frozen_lake'.*did you mean frozen-lake\?"):
        find_run("frozen_lake", runs_dir=tmp_path)
    with pytest.raises(RunFolderError, match="give the folder of a run"):
        find_run("zzz", runs_dir=tmp_path / "nowhere")


def test_a_run_without_samples_says_what_to_set(tmp_path):
    with pytest.raises(RunFolderError, match=r"no logged samples.*run\.log_samples is 0 \(set"):
        logged_episodes(tmp_path)
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match="line 1 is damaged"):
        logged_episodes(tmp_path)


def test_an_unknown_sample_names_those_that_are_close():
    episodes = [play({"said": ["a"]}, id=id) for id in ("12.0", "12.1", "13.0")]
    with pytest.raises(RunFolderError, match=r"no sample '12\.7' .*did you mean 12\.[01]"):
        find_episode(episodes, "12.7")
    with pytest.raises(RunFolderError, match=r"3 samples were logged, from 12\.0 to 13\.0"):
        find_episode(episodes, "x")


def test_of_two_samples_of_one_id_the_latest_is_found():
    early, late = play({"said": ["a"]}), play({"said": ["b"]})
    assert find_episode([early, late], "12.0") is late


def test_control_characters_become_pictures():
    assert printable("a\x1b[31m\r\x9b\x7f\n\té") == "a␛[31m␍�␡\n\té"


def test_shades_follow_the_probability_of_a_token():
    assert [shade(logp) for logp in (0.0, -0.2, -1.0, -3.0, -9.0, None)] == [0, 1, 2, 3, 4, 4]
