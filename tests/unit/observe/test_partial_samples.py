"""The tokens of samples in flight: what is added comes back after a kill, to the bit, and only what is still needed is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reroll.errors import RunFolderError
from reroll.observe import partial_samples
from reroll.observe.partial_samples import IN_FLIGHT, PartialSamples
from reroll.types import Completion, FinishReason, Request, SamplingParams, Versions, WrittenTokens


def ask(name: str, *prompt: int, seed: int = 0, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=9, seed=seed, **sampling)  # type: ignore[arg-type]
    return Request(id=name, prompt_ids=prompt or (5, 9), sampling=params)


def write(tokens: PartialSamples, request: Request, *ids: int, version: int = 0, scale: float = -0.5) -> None:
    turn, _ = tokens.turn(request)
    tokens.add(request.id, turn, np.array(ids, dtype=np.uint32), scale * np.array(ids, dtype=np.float64), version)


def end(tokens: PartialSamples, request: Request, completion: Completion) -> None:
    tokens.end(tokens.turn(request)[0], completion)


def opened(folder: Path, config: str = "c") -> PartialSamples:
    tokens = PartialSamples(folder, config=config)
    tokens.load()
    return tokens


WHOLE = Completion(
    token_ids=(3, 150_000, 4, 6), logprobs=(-0.5, -0.25, -1.0, -1.5), finish_reason=FinishReason.STOP, versions=((1, 2), (2, 2))
)


@pytest.mark.parametrize("scale", [-0.5, -0.1], ids=["single precision", "double precision"])
def test_what_was_flushed_is_there_after_a_kill_to_the_bit(tmp_path: Path, scale: float) -> None:
    tokens = PartialSamples(tmp_path, config="c")
    first, second = ask("3.0.0", 5, 9), ask("3.1.0", 5, 9, seed=7)
    write(tokens, first, 7, 150_000, version=1, scale=scale)
    write(tokens, second, 8, version=1, scale=scale)
    tokens.flush()
    write(tokens, first, 9, version=2, scale=scale)
    tokens.flush()
    write(tokens, first, 10, version=2)  # Not flushed: it dies with the process.
    found = opened(tmp_path)
    turn, num_other = found.turn(first)
    assert num_other == 0
    assert turn.written() == WrittenTokens(
        token_ids=(7, 150_000, 9), logprobs=(scale * 7, scale * 150_000, scale * 9), versions=((1, 2), (2, 1))
    )
    assert turn.completion() is None
    assert found.num_tokens("3.1") == 1
    assert (found.versions("3.0"), found.versions("3.1"), found.versions("3.2")) == (Versions(1, 2), Versions(1, 1), None)
    assert sorted(found.versions_in_group(3)) == [Versions(1, 1), Versions(1, 2)]


@pytest.mark.parametrize("num_told", [0, 1, 2, 3, 4])
def test_a_turn_that_ended_is_whole_once_another_follows_or_the_run_is_left_whatever_was_told_before(
    tmp_path: Path, num_told: int
) -> None:
    tokens = PartialSamples(tmp_path, config="c")
    request = ask("3.0.0")
    turn, _ = tokens.turn(request)
    for place, version in enumerate((1, 1, 2, 2)[:num_told]):
        ids, logprobs = WHOLE.token_ids[place : place + 1], WHOLE.logprobs[place : place + 1]
        tokens.add(request.id, turn, np.array(ids, dtype=np.uint32), np.array(logprobs), version)
        tokens.flush()
    end(tokens, request, WHOLE)
    assert turn.completion() == WHOLE
    tokens.flush()
    left = opened(tmp_path).turn(request)[0]
    assert (left.written().token_ids, left.completion()) == (WHOLE.token_ids[:num_told], None)
    tokens.turn(ask("3.0.1"))
    tokens.flush()
    assert opened(tmp_path).turn(request)[0].completion() == WHOLE
    last = ask("3.0.1")
    end(tokens, last, WHOLE)
    tokens.close()
    assert opened(tmp_path).turn(last)[0].completion() == WHOLE


@pytest.mark.parametrize(
    "other",
    [ask("3.0.0", 5, 8), ask("3.0.0", seed=1), ask("3.0.0", stop=("x",)), replace(ask("3.0.0"), prompt_ids=(5, 9, 9))],
    ids=["prompt", "seed", "stop", "longer prompt"],
)
def test_tokens_are_not_kept_for_another_question(tmp_path: Path, other: Request) -> None:
    tokens = PartialSamples(tmp_path, config="c")
    write(tokens, ask("3.0.0"), 7, 8)
    turn, num_other = tokens.turn(other)
    assert (turn.num_tokens, num_other) == (0, 2)
    write(tokens, other, 9)
    tokens.flush()
    assert opened(tmp_path).turn(other)[0].written().token_ids == (9,)


def test_what_was_drawn_anew_takes_the_place_of_what_was_forgotten(tmp_path: Path) -> None:
    tokens = PartialSamples(tmp_path, config="c")
    write(tokens, ask("3.0.0"), 7, 8)
    tokens.flush()
    tokens.forget("3.0")
    write(tokens, ask("3.0.0"), 9, version=4)
    tokens.flush()
    assert opened(tmp_path).turn(ask("3.0.0"))[0].written().versions == ((4, 1),)


def test_samples_that_can_no_longer_be_trained_on_are_forgotten(tmp_path: Path) -> None:
    tokens = PartialSamples(tmp_path, config="c")
    for number, version in enumerate((1, 2, 3)):
        write(tokens, ask(f"{number}.0.0"), 7, version=version)
        write(tokens, ask(f"{number}.0.1"), 7, version=5)
    tokens.forget_older(2)
    assert [tokens.num_tokens(f"{number}.0") for number in range(3)] == [0, 2, 2]


def test_what_lost_weights_wrote_is_forgotten_also_by_the_next_life(tmp_path: Path) -> None:
    tokens = PartialSamples(tmp_path, config="c")
    for number, version in enumerate((1, 2, 3)):
        write(tokens, ask(f"{number}.0.0"), 7, version=version)
    tokens.flush()
    tokens.forget_lost(2, in_flight={2})
    assert [tokens.num_tokens(f"{number}.0") for number in range(3)] == [1, 0, 1]
    write(tokens, ask("4.0.0"), 7, version=1)
    tokens.flush()
    assert [opened(tmp_path).num_tokens(f"{number}.0") for number in range(5)] == [1, 0, 1, 0, 1]


def test_a_torn_end_is_left_out_and_what_comes_before_it_is_not(tmp_path: Path) -> None:
    tokens = PartialSamples(tmp_path, config="c")
    for id in (7, 8, 9):
        write(tokens, ask("3.0.0"), id)
        tokens.flush()
    path, whole = tmp_path / IN_FLIGHT, (tmp_path / IN_FLIGHT).read_bytes()
    seen = set()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        seen.add(opened(tmp_path).turn(ask("3.0.0"))[0].written().token_ids)
    assert seen == {(), (7,), (7, 8)}


def test_of_another_config_nothing_is_taken_and_its_file_is_replaced(tmp_path: Path) -> None:
    first = PartialSamples(tmp_path, config="c")
    write(first, ask("3.0.0"), 7)
    first.close()
    other = opened(tmp_path, config="other")
    assert other.num_tokens("3.0") == 0
    write(other, ask("4.0.0"), 8)
    other.close()
    assert opened(tmp_path).num_tokens("3.0") == opened(tmp_path).num_tokens("4.0") == 0
    assert opened(tmp_path, config="other").num_tokens("4.0") == 1


def test_a_resumed_run_that_is_killed_again_has_what_the_first_one_left(tmp_path: Path) -> None:
    first = PartialSamples(tmp_path, config="c")
    write(first, ask("3.0.0"), 7, version=1)
    end(first, ask("4.0.0"), WHOLE)
    first.close()
    second = opened(tmp_path)
    write(second, ask("3.0.0"), 8, version=1)
    second.flush()
    third = opened(tmp_path)
    assert third.turn(ask("3.0.0"))[0].written().token_ids == (7, 8)
    assert third.turn(ask("4.0.0"))[0].completion() == WHOLE


def test_the_file_is_written_anew_without_what_is_not_needed_before_it_grows_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_samples, "_MAX_BYTES", 4000)
    tokens = PartialSamples(tmp_path, config="c")
    for number in range(500):
        write(tokens, ask("0.0.0"), number)
        write(tokens, ask(f"{number + 1}.0.0"), *range(20))
        tokens.flush()
        tokens.forget(f"{number + 1}.0")
        assert (tmp_path / IN_FLIGHT).stat().st_size < 2 * (4000 + 8 * 500)
    assert opened(tmp_path).turn(ask("0.0.0"))[0].written().token_ids == tuple(range(500))


def test_whoever_flushes_is_told_that_there_is_something_to_flush(tmp_path: Path) -> None:
    tokens, told = PartialSamples(tmp_path, config="c"), []
    tokens.on_added = lambda: told.append(1)
    write(tokens, ask("3.0.0"), 7)
    assert len(told) == 1


def test_a_write_that_fails_says_which_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tokens = PartialSamples(tmp_path / "file" / "journal", config="c")
    write(tokens, ask("3.0.0"), 7)
    with pytest.raises(RunFolderError, match=IN_FLIGHT):
        tokens.flush()


@pytest.mark.parametrize("is_new", [False, True], ids=["appended", "written anew"])
def test_the_experts_of_a_turn_that_ended_are_there_after_a_kill(tmp_path: Path, is_new: bool) -> None:
    rng = np.random.default_rng(0)
    routes = rng.integers(0, 200, size=(5, 3, 2)).astype(np.uint8)
    first, second, silent = ask("3.0.0", 5, 9), ask("3.1.0", 5, 9, seed=7), ask("3.2.0", 5, 9, seed=8)
    tokens = PartialSamples(tmp_path, config="c")
    write(tokens, first, *WHOLE.token_ids[:2], version=1, scale=-0.125)
    write(tokens, second, 8, version=1)
    tokens.flush()
    end(tokens, second, replace(WHOLE, routes=routes[:3].astype(np.int16)))
    end(tokens, silent, WHOLE)
    end(tokens, first, replace(WHOLE, routes=routes))
    tokens.close()
    found = opened(tmp_path)
    if is_new:
        found.add("3.9.0", found.turn(ask("3.9.0"))[0], np.array([1], dtype=np.uint32), np.array([-1.0]), 2)
        found.flush()
        found = opened(tmp_path)
    one, two, three = (found.turn(request)[0].completion() for request in (first, second, silent))
    assert three == WHOLE
    for completion, expected in ((one, routes), (two, routes[:3].astype(np.int16))):
        assert completion is not None
        assert completion.routes is not None
        assert completion.routes.dtype == expected.dtype
        assert np.array_equal(completion.routes, expected)
    assert three.routes is None
