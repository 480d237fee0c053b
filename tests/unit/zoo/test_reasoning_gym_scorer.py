"""reasoning-gym's scorers, where rewards and environments ask them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym
from reasoning_gym.factory import DATASETS

from reroll.errors import SandboxError
from reroll_zoo.guarded import contained as contained_module
from reroll_zoo.guarded import reasoning_gym as guarded
from reroll_zoo.guarded.reasoning_gym import TaskScorer
from reroll_zoo.sandbox.blocking import BlockingSandbox
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.sandbox.local import LEVELS

MANY_SOLUTIONS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks without a reference answer: any solution that works is right."""
NAMES = sorted(set(DATASETS) - {"composite"})
RUN = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
"""Generators whose scorers run the answer."""
RUN_TASK = (*RUN, "bitwise_arithmetic", "number_sorting")
"""And those that run parts of the task."""
SLOW_TO_MAKE = {"futoshiki", "knight_swap", "sokoban"}
"""Generators that take seconds for a task."""
FORMAT_CREDIT = 0.2
"""What a scorer may give to an answer that has the form and nothing else."""
NONSENSE = ("", " ", "qzx garbage ???", "-987654321.125", "nan", "{}", "[[[", "1e999")
CONSTANTS = ("0", "-0.0", "0/1", "0/7", "0e5", "1/2", "0.3", "inf", "whatever", "the", "[]", "[[]]", "()", "None", "{}", "0 0")
"""Answers that anybody can give to everything. `True` is right half of the time where there are two answers."""
MAX_MEAN_PAY = 0.5
"""For a constant answer that is not the reference: some scorers pay for being near."""


@pytest.fixture(scope="module")
def scorer() -> TaskScorer:
    return TaskScorer(LocalSandboxConfig(), wall_s=120.0, memory_mb=1024)


@cache
def tasks(name: str, num_tasks: int = 3) -> list[dict[str, Any]]:
    generator = reasoning_gym.create_dataset(name, size=num_tasks, seed=11)
    return [generator[index] for index in range(1 if name in SLOW_TO_MAKE else num_tasks)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_of_every_generator_earns_all_and_nonsense_next_to_nothing(scorer: TaskScorer, name: str) -> None:
    few = tasks(name)[:1] if name in RUN_TASK else tasks(name)
    for entry in few:
        if name in MANY_SOLUTIONS:
            assert entry["answer"] is None
        else:
            assert scorer.score(name, {}, entry, entry["answer"]) == 1.0
        for nonsense in NONSENSE:
            assert 0.0 <= scorer.score(name, {}, entry, nonsense) <= FORMAT_CREDIT, nonsense


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_tasks", [3, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in RUN_TASK])
def test_no_constant_answer_is_paid_for_tasks_that_it_does_not_solve(scorer: TaskScorer, name: str, num_tasks: int) -> None:
    for constant in CONSTANTS:
        entries = [entry for entry in tasks(name, num_tasks) if not _is_reference(constant, entry)]
        pays = [scorer.score(name, {}, entry, constant) for entry in entries]
        assert sum(pays) <= MAX_MEAN_PAY * len(pays), constant


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_TASK)
def test_no_constant_answer_is_paid_where_answers_are_run(scorer: TaskScorer, name: str) -> None:
    for constant in CONSTANTS:
        assert scorer.score(name, {}, tasks(name)[0], constant) <= FORMAT_CREDIT, constant


def _is_reference(constant: str, entry: dict[str, Any]) -> bool:
    """Whether a constant is the answer after all."""
    reference = str(entry["answer"]).strip()
    try:
        return float(constant) == float(reference)
    except ValueError:
        return constant.strip() == reference


def test_a_yes_or_no_task_does_not_pay_for_the_wrong_one(scorer: TaskScorer) -> None:
    for entry in tasks("game_of_life_halting"):
        wrong = "False" if entry["answer"] == "True" else "True"
        assert scorer.score("game_of_life_halting", {}, entry, wrong) == 0.0
        assert scorer.score("game_of_life_halting", {}, entry, f" {entry['answer'].lower()}") == 1.0


@pytest.mark.parametrize("given", ["0", "0.000", "0/1", "0/7", "0e5", "-0", "0.", "0.1", "1e-400", "1e999999999"])
def test_how_a_probability_begins_is_no_pass_for_every_coin_flip(scorer: TaskScorer, given: str) -> None:
    for entry in tasks("coin_flip", 40):
        assert scorer.score("coin_flip", {}, entry, given) == 0.0


def test_a_probability_may_be_a_fraction_or_rounded(scorer: TaskScorer) -> None:
    entry = {"answer": "0.3125", "metadata": {}}
    pays = [scorer.score("coin_flip", {}, entry, given) for given in ("5/16", "0.3125", " 0.31249", "0.31", "0.3", "0.4")]
    assert pays == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


# Answers that are run.


@pytest.fixture(scope="module", params=LEVELS)
def contained(request: pytest.FixtureRequest) -> Iterator[TaskScorer]:
    """A scorer at each level that this machine has, with a sandbox of its own."""
    try:
        box = BlockingSandbox(LocalSandboxConfig(level=request.param, site_packages=True), preload=("reasoning_gym",))
    except SandboxError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contained_module, "shared_sandbox", lambda config, preload: box)
        yield TaskScorer(LocalSandboxConfig(), wall_s=60.0, memory_mb=256)
    box.close()


def hostile(mark: Path) -> dict[str, str]:
    """Answers that do something, and what they attempt."""
    touch = f"__import__('os').system('touch {mark}')"
    return {
        "a file": f"[open({str(mark)!r}, 'w').write('x')]",
        "a shell": touch,
        "a shell, twice read": f"S({touch!r})",
        "a shell, in a format": f"f'{{{touch}}}'",
        "code that sympy writes": f"lambdify(x, {touch!r})(1)",
        "a patched scorer": "[setattr(__import__('sys').modules['reasoning_gym'].coaching.base, 'float', 1)]",
        "its own verdict": "[print('1.0'), exit(0)]",
        "the reference": "__import__('sys')._getframe(1).f_locals['entry']['answer']",
        "all memory": "[0]*10**12",
        "a class of its own": "type('x', (), {})",
    }


def test_an_answer_that_is_run_leaves_no_file_no_trace_and_earns_nothing(contained: TaskScorer, tmp_path: Path) -> None:
    for name in ("countdown", "spiral_matrix"):
        entry = tasks(name)[0]
        for what, answer in hostile(tmp_path / "mark").items():
            assert contained.score(name, {}, entry, answer) <= 0.05, what
            assert not list(tmp_path.iterdir()), what
        assert contained.score(name, {}, entry, "wrong") <= 0.05
        assert contained.score(name, {}, entry, entry["answer"]) == 1.0


def test_mathematics_is_read_wherever_it_is_run(contained: TaskScorer) -> None:
    entry = {"answer": "x**2 + C", "metadata": {"variable": "x", "integrand": "2*x"}}
    pays = [contained.score("simple_integration", {}, entry, given) for given in ("C + x**2", "x*x", "x**3", "sqrt(x)")]
    assert pays == [1.0, 1.0, 0.0, 0.0]
    entry = {"answer": "-cos(x) + C", "metadata": {"variable": "x", "integrand": "sin(x)"}}
    asked = ("-cos(x)", "C - cos(x)", "sin(x)", "integrate(sin(x), x)", "Integral(sin(x), x)")
    assert [contained.score("simple_integration", {}, entry, given) for given in asked] == [1.0, 1.0, 0.0, 0.0, 0.0]


EQUAL_TO_ALL = (
    "Function('f', __eq__=Function('y'))(x)",
    "Function('f', **{'__eq__': Function('y')})(x)",
    "Function('f', (Function('g'),), {'__eq__': Function('y')})(x)",
    "S(\"Function('f', __eq__=Function('y'))(x)\")",
)
"""sympy makes classes of what its `Function` is given, with the methods that come by keyword or in a table."""


def test_an_answer_that_says_it_is_equal_to_everything_earns_nothing(scorer: TaskScorer) -> None:
    entry = tasks("polynomial_multiplication")[0]
    assert [scorer.score("polynomial_multiplication", {}, entry, answer) for answer in EQUAL_TO_ALL] == [0.0] * 4
    assert scorer.score("polynomial_multiplication", {}, entry, f"expand(1)*0 + {entry['answer']}") == 0.0  # A name too many.
    assert scorer.score("polynomial_multiplication", {}, entry, f"sqrt(0) + {entry['answer']}") == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_no_scorer_lets_an_answer_out(scorer: TaskScorer, name: str, tmp_path: Path) -> None:
    for entry in tasks(name):
        for what, answer in hostile(tmp_path / "mark").items():
            assert scorer.score(name, {}, entry, answer) <= 0.05, what
            assert not list(tmp_path.iterdir()), what


@pytest.mark.parametrize("name", NAMES)
def test_only_known_scorers_run_anything(name: str) -> None:
    """So that a new version of the library that runs more is noticed. It would be contained, but slow."""
    generator = reasoning_gym.create_dataset(name, size=1, seed=11)
    entry = tasks(name)[0]
    with guarded.AuditWatch() as watch:
        for given in ("x y", "0x1f", "[1, 'a']", "(1 + 2) * x", "f(x)"):
            guarded._score(generator, given, entry)
    assert watch.refused is None or name in RUN_TASK


@pytest.mark.parametrize(
    "given", ["(49*(85 - 1)/14 - 42) - 73", "-1.5", "", "1 2 3\n4 5 6", "ABBA", "2*x**3 - 0.5*x*y + C", "x**12 / 4"]
)
def test_numbers_polynomials_and_single_words_need_no_sandbox(given: str) -> None:
    assert guarded._is_plain(given)


COMPUTED = ["2**9", "2**\n9**9", "[0]*99", "(0,)*99", "1e9", "'a'*9", "1if 1else 2", "Ⅰ", "0_0", "٣", "f(x)", "a.b", "x[0]"]
GROWING = ["x**999", "x**9**9", "(x)**9", "(x + 1)*(y + 1)", "S(1)", "x y(z)", "xy*z", "x**-1", "9x**2**2", "_ + _"]


@pytest.mark.parametrize("given", [*COMPUTED, *GROWING])
def test_what_can_name_or_grow_is_not_plain(given: str) -> None:
    assert not guarded._is_plain(given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("spiral_matrix", "The answer is 4."),
        ("string_insertion", "['A', 'B', \"C\"]"),
        ("number_sorting", "['1.0', '-2.5']"),
        ("countdown", "(3 + 5)*2 = 16, done"),
        ("n_queens", "_ Q _\nQ _ _\n_ _ Q"),
        ("bitwise_arithmetic", "0x1f"),
    ],
)
def test_ordinary_wrong_answers_need_no_sandbox(name: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = TaskScorer(LocalSandboxConfig(), wall_s=120.0, memory_mb=256)
    monkeypatch.setattr(scorer, "_contained", None)
    assert scorer.score(name, {}, tasks(name)[0], given) < 1.0


def test_where_reasoning_gym_cannot_be_imported_inside_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = BlockingSandbox(LocalSandboxConfig())
    monkeypatch.setattr(contained_module, "shared_sandbox", lambda config, preload: bare)
    scorer = TaskScorer(LocalSandboxConfig(), wall_s=120.0, memory_mb=256)
    with pytest.raises(SandboxError, match="No module named 'reasoning_gym'"):
        scorer.score("spiral_matrix", {}, tasks("spiral_matrix")[0], "f(x)")
    bare.close()
