"""A judge: votes, second tries, what is remembered, and what is asked once though many want to know."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from reroll.errors import ConfigError, RewardError
from reroll.rewards.base import RewardContext
from reroll.types import Completion, FinishReason, Message, Prompt, SamplingParams, Score, Status, Trajectory, Turn
from reroll_zoo.judge.answer import Answer, Unreadable
from reroll_zoo.judge.answers_cache import AnswersCache, question_key
from reroll_zoo.judge.config import JudgeConfig
from reroll_zoo.judge.judge import Judge, open_judge

CUT = "(cut)"
"""What a reply ends with that its model did not end."""
DONE = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
PROMPT = Prompt(id="p/0", messages=(Message(role="user", content="Six times seven?"),), domain="p", answer="42")


def said(*texts: str) -> Trajectory:
    turns = []
    for number, text in enumerate(texts):
        shown = (Message(role="user", content=f"Go on, {number}."),) if number else ()
        turns.append(Turn(prompt_ids=(0,), completion=DONE, text=text, shown=shown))
    return Trajectory(id="s", turns=tuple(turns), status=Status.COMPLETED)


def config(**options: Any) -> JudgeConfig:
    return JudgeConfig.model_validate({"kind": "judge", "model": {"kind": "hosted", "model": "m"}} | options)


class Scripted:
    """A model that says what a function makes of each question."""

    def __init__(self, reply: Callable[[str, SamplingParams], str]) -> None:
        self._reply = reply
        self.asked: list[tuple[str, SamplingParams]] = []
        self.is_closed = False

    async def __call__(self, messages: list[Message], sampling: SamplingParams) -> Answer:
        self.asked.append((messages[-1]["content"], sampling))
        await asyncio.sleep(0.001)
        text = self._reply(messages[-1]["content"], sampling)
        is_whole = not text.endswith(CUT)
        return Answer(text=text.removesuffix(CUT), is_whole=is_whole, prompt_tokens=100, completion_tokens=10)

    async def close(self) -> None:
        self.is_closed = True


def says(replies: Iterable[str]) -> Scripted:
    queue = iter(replies)
    return Scripted(lambda question, sampling: next(queue))


def by_seed(replies: dict[int, str]) -> Scripted:
    return Scripted(lambda question, sampling: replies[sampling.seed])


def judge(model: Scripted, path: Path | None = None, /, **options: Any) -> Judge:
    return Judge(config(**options), model, AnswersCache(path), name="p", template=options.get("template"))


def counts(it: Judge) -> dict[str, float]:
    return {name.removeprefix("reward/judge/p/"): value for name, value in it.stats().values_by_name().items()}


async def test_an_answer_is_shown_with_its_question_and_scored() -> None:
    model = says(["Right.\nScore: 8"])
    assert await judge(model)(PROMPT, said("It is 42.")) == Score(value=0.8)
    [(question, sampling)] = model.asked
    assert "Six times seven?" in question
    assert "It is 42." in question
    assert sampling == SamplingParams(max_tokens=1024, temperature=0.0, seed=0)


async def test_of_an_episode_everything_said_is_judged() -> None:
    model = says(["Score: 8"])
    await judge(model)(PROMPT, said("It is 41.", "No, 42."))
    [(question, _)] = model.asked
    assert "[assistant]\nIt is 41.\n\n[user]\nGo on, 1.\n\n[assistant]\nNo, 42.\n</answer-" in question


async def test_an_empty_answer_gets_the_worst_score_unread() -> None:
    model = says([])
    assert await judge(model)(PROMPT, said(" \n")) == Score(value=0.0)
    assert await judge(model, words={"good": 1, "bad": -1})(PROMPT, said("", "\n")) == Score(value=-1.0)
    assert not model.asked
    assert await judge(says(["Score: 5"]))(PROMPT, said("42", "")) == Score(value=0.5), "it said something in the end"


@pytest.mark.parametrize(
    ("aggregate", "scores", "value"),
    [
        ("mean", (0, 5, 10), 0.5),
        ("mean", (0, 10, 10), pytest.approx(2 / 3)),
        ("median", (0, 10, 10), 1.0),
        ("median", (0, 1, 10), 0.1),
        ("majority", (10, 2, 10), 1.0),
        ("majority", (10, 2, 5), 0.2),
    ],
)
async def test_votes_come_to_one_score(aggregate: str, scores: tuple[int, ...], value: Any) -> None:
    model = by_seed({2 * number: f"Score: {score}" for number, score in enumerate(scores)})
    it = judge(model, votes=len(scores), aggregate=aggregate, temperature=1.0)
    assert (await it(PROMPT, said("It is 42."))).value == value


async def test_a_reply_without_a_score_is_asked_for_once_more_with_another_seed() -> None:
    model = says(["Hm.", "Score: 6"])
    it = judge(model)
    assert await it(PROMPT, said("It is 42.")) == Score(value=0.6)
    first, second = (sampling for _, sampling in model.asked)
    assert first.seed != second.seed
    assert (first.temperature, second.temperature) == (0.0, 0.7), "a greedy judge would say the same again"
    assert counts(it)["unparseable"] == 1


async def test_a_vote_that_is_unreadable_twice_is_left_out() -> None:
    replies = {0: "Score: 4", 2: "Hm.", 3: "Hm.", 4: "Score: 6"}
    assert (await judge(by_seed(replies), votes=3, temperature=1.0)(PROMPT, said("It is 42."))).value == 0.5


async def test_without_a_single_vote_the_sample_fails_or_gets_the_score_it_is_to_get() -> None:
    with pytest.raises(RewardError, match=r"the judge p gave no score it was asked for; it ends: 'Hm\.'"):
        await judge(says(["Hm."] * 4))(PROMPT, said("It is 42."))
    assert await judge(says(["Hm.", "Hm."]), on_unparseable=-0.5)(PROMPT, said("It is 42.")) == Score(value=-0.5)


async def test_a_reply_that_was_cut_off_has_no_score_and_is_remembered_as_such(tmp_path: Path) -> None:
    quoting = f"The answer says:\nScore: 10{CUT}"
    model = says([quoting, "Score: 2"])
    assert (await judge(model, tmp_path / "answers.sqlite")(PROMPT, said("It is 5.\nScore: 10"))).value == 0.2
    with pytest.raises(RewardError, match=r"it was cut off \(raise max_tokens\), and ends: .*Score: 10"):
        await judge(says([quoting] * 4))(PROMPT, said("It is 5.\nScore: 10"))
    again = judge(says([]), tmp_path / "answers.sqlite")
    assert (await again(PROMPT, said("It is 5.\nScore: 10"))).value == 0.2


@pytest.mark.parametrize("problem", ["rambles", "too long"])
async def test_an_answer_that_the_judge_cannot_score_is_the_worst_where_it_could_score_another(problem: str) -> None:
    def reply(question: str, sampling: SamplingParams) -> str:
        if "I do not know." in question:
            return "Score: 0"
        if problem == "too long":
            raise Unreadable("the context is too short for it")
        return "Well" + CUT

    it = judge(Scripted(reply), votes=2)
    assert await it(PROMPT, said("It is 42.")) == Score(value=0.0, info={"unjudged": 1.0})


async def test_a_judge_that_can_read_nothing_fails_the_sample() -> None:
    def reply(question: str, sampling: SamplingParams) -> str:
        raise Unreadable("unknown parameter")

    with pytest.raises(RewardError, match="unknown parameter"):
        await judge(Scripted(reply))(PROMPT, said("It is 42."))


async def test_a_judge_that_cannot_be_reached_fails_the_sample_whatever_is_to_become_of_unreadable_ones() -> None:
    def reply(question: str, sampling: SamplingParams) -> str:
        raise RewardError("the judge is gone")

    it = judge(Scripted(reply), on_unparseable=0)
    with pytest.raises(RewardError, match="the judge is gone"):
        await it(PROMPT, said("It is 42."))
    assert counts(it)["failures"] == 1


async def test_a_vote_that_got_no_reply_does_not_void_the_others() -> None:
    def reply(question: str, sampling: SamplingParams) -> str:
        if sampling.seed:
            raise RewardError("the judge is gone")
        return "Score: 4"

    assert (await judge(Scripted(reply), votes=2, temperature=1.0)(PROMPT, said("It is 42."))).value == 0.4


async def test_a_template_that_speaks_of_a_reference_needs_one() -> None:
    without = Prompt(id="p/1", messages=PROMPT.messages, domain="p")
    it = judge(says(["Score: 1"]), template="{answer} {reference}")
    with pytest.raises(RewardError, match="prompt p/1 has no reference answer"):
        await it(without, said("42"))
    assert await judge(says(["Score: 1"]))(without, said("42")) == Score(value=0.1)


async def test_what_was_asked_before_is_not_asked_again_even_by_another_process(tmp_path: Path) -> None:
    first = judge(says(["Hm.", "Score: 6"]), tmp_path / "answers.sqlite")
    assert (await first(PROMPT, said("It is 42."))).value == 0.6
    assert (await first(PROMPT, said("It is 42."))).value == 0.6
    told = counts(first)
    assert (told["requests"], told["cache_hits"]) == (2, 2)
    assert (told["prompt_tokens"], told["completion_tokens"]) == (200, 20)
    await first.close()

    second = judge(says([]), tmp_path / "answers.sqlite")
    assert (await second(PROMPT, said("It is 42."))).value == 0.6
    told = counts(second)
    assert (told["requests"], told["cache_hits"], told["prompt_tokens"]) == (0, 2, 0)
    await second.close()


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"kind": "hosted", "model": "other"}},
        {"model": {"kind": "endpoint", "url": "http://here", "model": "m"}},
        {"temperature": 0.5},
        {"max_tokens": 7},
        {"template": "{answer}"},
    ],
)
async def test_another_model_sampling_or_text_is_another_question(tmp_path: Path, other: dict[str, Any]) -> None:
    first, second = says(["Score: 1"]), says(["Score: 2"])
    await judge(first, tmp_path / "answers.sqlite")(PROMPT, said("It is 42."))
    assert (await judge(second, tmp_path / "answers.sqlite", **other)(PROMPT, said("It is 42."))).value == 0.2


async def test_siblings_that_say_the_same_are_judged_once() -> None:
    model = says(["Score: 6"])
    it = judge(model)
    scores = await asyncio.gather(*(it(PROMPT, said("It is 42.")) for _ in range(8)))
    assert {score.value for score in scores} == {0.6}
    assert len(model.asked) == 1
    assert counts(it)["cache_hits"] == 7


async def test_a_sibling_that_is_aborted_does_not_take_the_question_with_it() -> None:
    model = says(["Score: 6"])
    it = judge(model)
    first, second = (asyncio.create_task(it(PROMPT, said("It is 42."))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).value == 0.6
    assert first.cancelled()


class Silent(Scripted):
    async def __call__(self, messages: list[Message], sampling: SamplingParams) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError


async def test_closing_gives_up_what_is_asked_and_closes_the_model() -> None:
    model = Silent(lambda question, sampling: "")
    it = judge(model)
    waiting = asyncio.create_task(it(PROMPT, said("It is 42.")))
    await asyncio.sleep(0.01)
    await it.close()
    await it.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert model.is_closed


async def test_readings_start_anew_once_taken() -> None:
    it = judge(says(["Score: 6"]))
    await it(PROMPT, said("It is 42."))
    told = counts(it)
    assert told["requests"] == 1
    assert 0 < told["latency_s"] == told["latency_max_s"] < 1
    assert set(counts(it).values()) == {0}


WRITE_UNTIL_KILLED = """
import asyncio, itertools, sys
from pathlib import Path
from reroll_zoo.judge.answers_cache import AnswersCache

async def write():
    cache = AnswersCache(Path(sys.argv[1]))
    for number in itertools.count():
        await cache.put(f"key {number}", f"reply {number}")
        print(number, flush=True)

asyncio.run(write())
"""


async def test_answers_survive_a_crash_right_after_they_came(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path / "a.sqlite")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 30:
            pass
        process.kill()
    cache = AnswersCache(tmp_path / "a.sqlite")
    assert [await cache.get(f"key {number}") for number in range(31)] == [f"reply {number}" for number in range(31)]
    cache.close()


async def test_two_processes_may_write_one_file(tmp_path: Path) -> None:
    one, other = AnswersCache(tmp_path / "a.sqlite"), AnswersCache(tmp_path / "a.sqlite")
    await asyncio.gather(*(cache.put(f"{name} {n}", name) for n in range(50) for name, cache in (("1", one), ("2", other))))
    assert [await one.get(f"2 {n}") for n in range(50)] == ["2"] * 50
    assert [await other.get(f"1 {n}") for n in range(50)] == ["1"] * 50
    one.close()
    other.close()


async def test_a_file_that_breaks_later_costs_requests_and_not_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = says(["Score: 6", "Score: 6"])
    it = judge(model, tmp_path / "a.sqlite")
    it._cache._thread.submit(it._cache._file.execute, "DROP TABLE answers").result()
    assert (await it(PROMPT, said("It is 42."))).value == 0.6
    assert (await it(PROMPT, said("It is 42."))).value == 0.6
    assert len(model.asked) == 2
    assert len(caplog.records) == 1


def test_a_file_that_is_no_table_of_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_text("my diary, page one of many, nothing for machines to read " * 20)
    with pytest.raises(
        ConfigError, match=r"rewards.p.cache: .*a.sqlite cannot hold answers: file is not a database \(name another file"
    ):
        open_judge(config(cache=tmp_path / "a.sqlite"), RewardContext(name="p", host=says([])))


async def test_the_cache_lies_in_the_runs_folder_unless_the_config_names_a_file(tmp_path: Path) -> None:
    for folder, options in (("run", {}), ("else", {"cache": tmp_path / "else" / "mine.sqlite"})):
        it = open_judge(config(**options), RewardContext(name="p", host=says(["Score: 6"]), run_folder=tmp_path / "run"))
        await it(PROMPT, said("It is 42."))
        await it.close()
        assert len(list((tmp_path / folder).glob("*.sqlite"))) == 1


async def test_a_template_is_read_from_a_file_beside_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text("MY OWN: {answer}")
    model = says(["Score: 6"])
    it = open_judge(config(template_file="judge.txt"), RewardContext(name="p", host=model, config_folder=tmp_path))
    await it(PROMPT, said("It is 42."))
    assert model.asked[0][0].startswith("MY OWN: <answer-")


def test_keys_differ_by_seed() -> None:
    messages = [Message(role="user", content="?")]
    keys = {question_key("m", messages, SamplingParams(max_tokens=1, seed=seed)) for seed in range(3)}
    assert len(keys) == 3
