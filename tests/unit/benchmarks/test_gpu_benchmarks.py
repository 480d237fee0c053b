"""The benchmarks that wait for a GPU: what they ask, count and tell is right, wherever they run."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts, no package

import exact_decode  # noqa: E402
from exact_probe import probed, spans  # noqa: E402
from gpu_shapes import SHAPES, write_model  # noqa: E402
from gpu_work import Work, prompts, work_of  # noqa: E402
from learning_tasks import TASKS, held_out, reward_of, to_train  # noqa: E402
from learning_trl import table  # noqa: E402
from recurrent import models, num_parameters  # noqa: E402

from reroll.models.load import load_tokenizer  # noqa: E402
from reroll.tokens.renderer import Renderer  # noqa: E402


def test_a_prompt_has_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["tiny"])
    renderer = Renderer(load_tokenizer(str(tmp_path)))
    work = Work(prompts=2, prompt_tokens=50, steps=1)
    rendered = [renderer.start([{"role": "user", "content": prompt}]) for prompt in prompts(work)]  # type: ignore[list-item]
    assert [len(ids) for ids in rendered] == [50, 50]
    assert rendered[0] != rendered[1]


def test_a_work_comes_through_an_argument_as_it_was() -> None:
    work = Work(prompts=3, siblings=16, prompt_tokens=1024, device="cpu")
    assert work_of(work.as_argument()) == work
    assert work.num_distinct_tokens == 3 * 1024 + 48 * 256


@pytest.mark.parametrize("task", TASKS)
def test_no_question_that_is_held_out_is_trained_on(task: str) -> None:
    kept, trained = held_out(task), to_train(task, seed=3, num=500)
    assert not {row["prompt"] for row in kept} & {row["prompt"] for row in trained}
    assert trained == to_train(task, seed=3, num=500) != to_train(task, seed=4, num=500)
    assert all(reward_of(f"It is {row['answer']}.", row["answer"]) == 1 for row in kept)
    assert reward_of("It is 12, or rather 13.", "12") == reward_of("nothing", "12") == 0


def test_a_difference_is_taken_between_runs_of_the_same_task_and_seed() -> None:
    gained = {"sums": 0.1, "products": 0.3}
    rows = [
        {"name": arm, "task": task, "seed": seed, "reward": seed + (arm == "ours") * gained[task], "held_out": 0.5}
        for arm, task, seed in product(("theirs", "ours"), gained, range(3))
        if (arm, task, seed) != ("theirs", "sums", 2)  # It was cut off.
    ]
    lines = {(line["task"], line["arm"]): line for line in table(rows, ["theirs", "ours"])}
    assert lines["sums", "ours"]["reward less theirs"] == "+0.100 (+0.100 to +0.100)"
    assert lines["all", "ours"]["pairs"] == 5
    assert str(lines["all", "ours"]["reward less theirs"]).startswith("+0.220 (")
    assert lines["all", "theirs"]["pairs"] == 0


def test_numbers_of_rows_that_give_the_same_bits_are_one_class() -> None:
    tried = [1, 2, 3, 4, 8, 2048]
    found = probed(lambda num: torch.tensor([float(num in (3, 4, 2048))]), tried)
    assert found == {"classes": 2, "M": "1-2, 8 | 3-4, 2048"}
    assert spans([2, 3, 4, 8], tried) == "2-8"


def test_a_decode_step_is_told_kernel_by_kernel_with_the_longest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARM", "TIMED", "PROFILED"):
        monkeypatch.setattr(exact_decode, name, 2)
    write_model(tmp_path, SHAPES["tiny"])
    took, kernels = exact_decode.step_of(str(tmp_path), 3, is_exact=True)
    times = [ms for ms, _, _ in kernels]
    assert took > 0
    assert times == sorted(times, reverse=True)
    assert any("linear" in name or "mm" in name for _, count, name in kernels if count >= 1)


def test_the_models_that_are_compared_are_equally_large() -> None:
    hybrid, attention = (num_parameters(sizes) for sizes in models().values())
    assert abs(hybrid / attention - 1) < 0.05
