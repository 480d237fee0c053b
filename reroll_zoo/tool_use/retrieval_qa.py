"""Questions about invented people and towns, and a search over the corpus that tells of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from pydantic import Field

from reroll.tokens.tool_calls import Call
from reroll.types import Message
from reroll_zoo.tool_use.config import ToolLimitsConfig
from reroll_zoo.tool_use.env import Task, ToolLoop
from reroll_zoo.tool_use.search import Passage, PassageIndex, search_tool

_RULES = "Answer the question in a few words. Find the facts with the tool search."
_PEOPLE_PER_TOWN = 5
_HELD_OUT_EVERY = 5
_ONSETS = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "kr", "tr"]
_SYLLABLES = [onset + vowel for onset in _ONSETS for vowel in "aeiou"]
_ENDINGS = ["l", "n", "r", "s", "k", "m"]
_JOBS = ["baker", "carpenter", "composer", "dentist", "farmer", "judge", "mason", "nurse", "painter", "pilot", "poet", "weaver"]
_GOODS = ["amber", "apples", "bells", "candles", "carpets", "cheese", "clocks", "honey", "lace", "paper", "salt", "silk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Town:
    """A place and what is known of it."""

    name: str
    river: str
    region: str
    founded: int
    good: str

    @property
    def passage(self) -> Passage:
        """What the corpus says of this town."""
        text = f"a town on the river {self.river} in {self.region}, founded in {self.founded} and known for its {self.good}."
        return Passage(self.name, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Somebody and what is known of them."""

    name: str
    job: str
    born_in: Town
    born: int
    lives_in: Town
    taught_by: int
    """Place of the teacher in the list of people."""

    def passage(self, teacher: Person) -> Passage:
        """What the corpus says of this person."""
        life = f"born in {self.born_in.name} in {self.born}, lives in {self.lives_in.name}"
        return Passage(self.name, f"{self.job}, {life}, taught by {teacher.name}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalQuestion:
    """What is asked, the answer, and the searches that find it."""

    text: str
    answer: str
    queries: tuple[str, ...]


class Corpus:
    """People and towns: equal seeds and sizes give equal ones."""

    def __init__(self, *, seed: int, num_people: int) -> None:
        rng = random.Random(seed)
        num_towns = max(2, num_people // _PEOPLE_PER_TOWN)
        names = _Names(rng)
        regions = [names.word(3) for _ in range(max(2, num_towns // 10))]
        self.towns = [
            Town(
                name=names.word(3),
                river=names.word(2),
                region=rng.choice(regions),
                founded=rng.randint(900, 1800),
                good=rng.choice(_GOODS),
            )
            for _ in range(num_towns)
        ]
        self.people = [self._person(rng, names, place, num_people) for place in range(num_people)]
        self._held_out = self.people[::_HELD_OUT_EVERY]
        self._for_training = [person for place, person in enumerate(self.people) if place % _HELD_OUT_EVERY]
        told = [person.passage(self.people[person.taught_by]) for person in self.people]
        self.index = PassageIndex([*told, *(town.passage for town in self.towns)])

    def _person(self, rng: random.Random, names: _Names, place: int, num_people: int) -> Person:
        born_in, lives_in = rng.sample(self.towns, 2)
        return Person(
            name=names.person(),
            job=rng.choice(_JOBS),
            born_in=born_in,
            born=rng.randint(1850, 1999),
            lives_in=lives_in,
            taught_by=(place + rng.randint(1, num_people - 1)) % num_people,
        )

    def ask(self, rng: random.Random, *, held_out: bool, two_hop_share: float) -> RetrievalQuestion:
        """A question about one of the people that are for training, or of those held out from it."""
        person = rng.choice(self._held_out if held_out else self._for_training)
        teacher = self.people[person.taught_by]
        name, home, birthplace = person.name, person.lives_in, person.born_in
        one_hop = [
            (f"In which town was {name} born?", birthplace.name),
            (f"In which year was {name} born?", str(person.born)),
            (f"In which town does {name} live?", home.name),
            (f"What is the profession of {name}?", person.job),
            (f"Who taught {name}?", teacher.name),
        ]
        two_hops = [
            (f"On which river is the town where {name} was born?", birthplace.river, birthplace.name),
            (f"In which region is the town where {name} lives?", home.region, home.name),
            (f"In which year was the town founded where {name} lives?", str(home.founded), home.name),
            (f"What is the town known for where {name} was born?", birthplace.good, birthplace.name),
            (f"In which town was the teacher of {name} born?", teacher.born_in.name, teacher.name),
            (f"What is the profession of the teacher of {name}?", teacher.job, teacher.name),
        ]
        if rng.random() >= two_hop_share:
            text, answer = rng.choice(one_hop)
            return RetrievalQuestion(text=text, answer=answer, queries=(name,))
        text, answer, bridge = rng.choice(two_hops)
        return RetrievalQuestion(text=text, answer=answer, queries=(name, bridge))


class RetrievalQaConfig(ToolLimitsConfig):
    """Questions about invented people and towns, answered with a search in a corpus made for them. A right answer pays 1."""

    runs: ClassVar[str] = "reroll_zoo.tool_use.retrieval_qa:RetrievalQa"

    kind: Literal["retrieval_qa"] = "retrieval_qa"
    num_people: int = Field(default=1000, ge=10)
    """Size of the corpus, which has a town for every five people. It is held in memory, about 1 kB for each of them."""
    corpus_seed: int = Field(default=0, ge=0)
    """Different seeds give different people and towns."""
    two_hop_share: float = Field(default=0.5, ge=0, le=1)
    """How many of the questions need two searches."""
    num_results: int = Field(default=3, ge=1)
    """Passages that a search returns."""
    first_held_out_seed: int = Field(default=1_000_000, ge=0)
    """Seeds from here on ask about the fifth of the people that no lower seed asks about: take held-out tasks from them."""


class RetrievalQa(ToolLoop):
    """One question."""

    def __init__(self, options: RetrievalQaConfig) -> None:
        self.corpus = open_corpus(seed=options.corpus_seed, num_people=options.num_people)
        self._options = options
        self._queries: tuple[str, ...] = ()
        super().__init__(options, tools=[search_tool(self.corpus.index, num_results=options.num_results)])

    def draw_task(self, seed: int) -> Task:
        held_out = seed >= self._options.first_held_out_seed
        question = self.corpus.ask(random.Random(seed), held_out=held_out, two_hop_share=self._options.two_hop_share)
        self._queries = question.queries
        messages = (Message(role="system", content=_RULES), Message(role="user", content=question.text))
        return Task(messages=messages, answer=question.answer)

    def solve(self) -> list[str]:
        """The searches that find the facts, then the answer. Empty when the episode is over."""
        return self.play_on([Call("search", {"query": query}) for query in self._queries])


class _Names:
    """Invented names, none of them twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()
        self._first_names = [self.word(2) for _ in range(100)]

    def word(self, num_syllables: int) -> str:
        """A name of one word. It gets longer as the short ones run out."""
        for extra in range(1, 1000):
            syllables = self._rng.choices(_SYLLABLES, k=num_syllables + extra // 50)
            word = "".join([*syllables, self._rng.choice(_ENDINGS)]).capitalize()
            if word not in self._used:
                self._used.add(word)
                return word
        raise AssertionError("names of 20 syllables do not run out")

    def person(self) -> str:
        """A first name that others may have too, and a last name that nobody else has."""
        return f"{self._rng.choice(self._first_names)} {self.word(3)}"


@lru_cache(maxsize=4)
def open_corpus(*, seed: int, num_people: int) -> Corpus:
    """A corpus and its index, made once a process."""
    return Corpus(seed=seed, num_people=num_people)
