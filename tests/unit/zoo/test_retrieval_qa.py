from __future__ import annotations

import random
import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.tokens.tool_calls import write_call
from reroll_zoo.tool_use.retrieval_qa import Corpus, RetrievalQa, RetrievalQaConfig, open_corpus
from reroll_zoo.tool_use.search import Passage, PassageIndex, search_tool

LIBRARY = PassageIndex(
    [
        Passage("Red fox", "a fox that hunts at night."),
        Passage("Owl", "a bird that hunts at night and fears the red fox."),
        Passage("Lamp", "it is red."),
        Passage("Snow", "it is white."),
    ]
)
HELD_OUT = 1_000_000


def titles(query: str, *, num_results: int = 3) -> list[str]:
    return [passage.title for passage in LIBRARY.search(query, num_results=num_results)]


# The search.


def test_passages_with_all_words_come_first_and_titles_count_most() -> None:
    assert titles("red fox") == ["Red fox", "Owl", "Lamp"]
    assert titles("Who hunts the NIGHT?") == ["Red fox", "Owl"]
    assert titles("hunting") == ["Red fox", "Owl"]
    assert titles("red fox", num_results=1) == ["Red fox"]


def test_a_search_that_finds_nothing_says_so() -> None:
    for query in ("zebra", "", "the of", "!?"):
        assert search_tool(LIBRARY, num_results=3).run({"query": query}, 1.0) == "Nothing was found: try other words."


@given(st.text())
def test_any_query_is_searched_for_as_words(query: str) -> None:
    LIBRARY.search(query, num_results=3)


def test_operators_of_the_index_are_only_words() -> None:
    assert titles('red NOT fox" OR (') == titles("red not fox or")


def test_threads_share_an_index() -> None:
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(titles("red fox"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["Red fox", "Owl", "Lamp"]] * 8


# The corpus.


def test_equal_seeds_give_equal_corpora_and_others_differ() -> None:
    assert Corpus(seed=1, num_people=20).people == Corpus(seed=1, num_people=20).people
    assert Corpus(seed=1, num_people=20).people != Corpus(seed=2, num_people=20).people
    assert Corpus(seed=1, num_people=20).people[0].name == "Modrum Lodrekrar"


def test_names_are_unique_and_nobody_teaches_themselves() -> None:
    corpus = open_corpus(seed=0, num_people=3000)
    names = [person.name for person in corpus.people] + [town.name for town in corpus.towns]
    assert len(set(names)) == len(names) == 3600
    assert all(place != person.taught_by for place, person in enumerate(corpus.people))
    assert all(person.born_in != person.lives_in for person in corpus.people)


def test_every_fact_that_is_asked_for_is_told_in_a_passage() -> None:
    corpus = Corpus(seed=0, num_people=50)
    for person in corpus.people:
        teacher = corpus.people[person.taught_by]
        (found, *_) = corpus.index.search(person.name, num_results=1)
        assert found.title == person.name
        facts = (person.job, person.born_in.name, str(person.born), person.lives_in.name, teacher.name)
        assert all(fact in found.text for fact in facts)
    for town in corpus.towns:
        (found, *_) = corpus.index.search(town.name, num_results=1)
        assert found.title == town.name
        assert all(fact in found.text for fact in (town.river, town.region, str(town.founded), town.good))


# The game.


@pytest.mark.parametrize("num_people", [10, 1000])
@settings(max_examples=60)
@given(seed=st.integers(0, 2 * HELD_OUT))
def test_the_oracle_finds_every_answer_in_what_it_is_shown(num_people: int, seed: int) -> None:
    env = RetrievalQa(RetrievalQaConfig(num_people=num_people))
    env.reset(seed)
    *searches, answer = env.solve()
    shown = [env.step(search).messages[0]["content"] for search in searches]
    assert answer.removeprefix("<answer>").removesuffix("</answer>") in shown[-1].splitlines()[0]
    outcome = env.step(answer)
    assert (outcome.reward, outcome.terminated, outcome.info["success"]) == (1.0, True, 1.0)
    assert env.solve() == []


def test_the_first_passage_does_not_answer_a_question_of_two_hops() -> None:
    env = RetrievalQa(RetrievalQaConfig(two_hop_share=1.0))
    leaks = 0
    for seed in range(100):
        env.reset(seed)
        first, _, answer = env.solve()
        leaks += answer.removeprefix("<answer>").removesuffix("</answer>") in env.step(first).messages[0]["content"]
    assert leaks < 10  # By chance: a teacher of the same profession, say.


def test_the_share_of_two_hops_is_as_asked() -> None:
    for share, low, high in ((0.0, 0, 0), (1.0, 200, 200), (0.5, 70, 130)):
        env = RetrievalQa(RetrievalQaConfig(two_hop_share=share))
        num_two_hops = 0
        for seed in range(200):
            env.reset(seed)
            num_two_hops += len(env.solve()) == 3
        assert low <= num_two_hops <= high


def test_held_out_seeds_ask_about_other_people() -> None:
    env = RetrievalQa(RetrievalQaConfig(num_people=40))

    def subjects(first_seed: int) -> set[str]:
        asked = (env.reset(seed)[1]["content"] for seed in range(first_seed, first_seed + 300))
        return {name for question in asked for name in re.findall(r"[A-Z]\w+ [A-Z]\w+", question)}

    trained, held_out = subjects(0), subjects(HELD_OUT)
    assert (len(trained), len(held_out)) == (32, 8)
    assert not trained & held_out


def test_answers_are_compared_without_case_and_punctuation() -> None:
    env = RetrievalQa(RetrievalQaConfig())
    seed = next(seed for seed in range(100) if env.reset(seed)[1]["content"].startswith("Who taught"))
    env.reset(seed)
    name = env.solve()[-1].removeprefix("<answer>").removesuffix("</answer>")
    assert env.step(f"So <answer>{name.upper()}!</answer>").reward == 1.0
    env.reset(seed)
    assert env.step("<answer>nobody</answer>").reward == 0.0


def test_equal_seeds_and_actions_give_equal_episodes() -> None:
    def episode() -> list[object]:
        env = RetrievalQa(RetrievalQaConfig())
        rng = random.Random(0)
        shown: list[object] = [env.reset(11)]
        for _ in range(3):
            query = rng.choice(env.corpus.people).name
            shown.append(env.step(write_call("search", {"query": query})))
        return shown

    assert episode() == episode()


def test_a_search_shows_as_many_passages_as_asked_for_one_a_line() -> None:
    env = RetrievalQa(RetrievalQaConfig(num_results=2))
    env.reset(0)
    text = env.step(write_call("search", {"query": env.corpus.people[0].name.split()[0]})).messages[0]["content"]
    assert len(text.splitlines()) == 2
    assert len(text) < 250


def test_the_node_holds_the_options_of_the_class() -> None:
    node = RetrievalQaConfig(num_people=10, max_calls=2)
    env = node.make()
    assert len(env.corpus.people) == 10
