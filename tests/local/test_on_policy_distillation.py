"""On-policy distillation: teachers judge every token that the policy writes, alone or beside a reward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from reroll.config.load import parse_config
from reroll.errors import ModelError
from reroll.models.load import load_model, load_tokenizer
from reroll.pipeline import rlvr
from reroll.pipeline.base import Outcome
from reroll.pipeline.run import train
from reroll.tokens.batch import Batch, pack
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.training.base import Divergence, Needs, required
from reroll.training.predict import predict
from reroll.types import Group
from reroll_zoo.tiny_models import make_tiny

DIGITS = [{"prompt": f"digit {digit}", "answer": "7"} for digit in range(10)]
LETTERS = [{"prompt": f"letter {letter}", "answer": "e"} for letter in "abcdefghij"]
MIXED_UP = [
    {"prompt": row["prompt"], "answer": answer} for row, answer in zip(DIGITS + LETTERS, "1470369258jihgfedcba", strict=True)
]
"""What the beginner saw: it answers digits with digits and letters with letters, seldom with the right one."""


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fine_tuned(folder: Path, model: Path, rows: Sequence[dict[str, str]], *, steps: int) -> str:
    """A checkpoint that has seen the rows for so many steps."""
    folder.mkdir()
    tree = {
        "pipeline": "sft",
        "run": {"name": "sft", "runs_dir": str(folder), "steps": steps},
        "policy": {"model": str(model), "devices": "cpu", "optim": {"lr": 1e-2}},
        "data": {"train": [{"kind": "jsonl", "path": write_rows(folder / "rows.jsonl", rows)}]},
        "rows_per_step": 10,
        "max_tokens": 64,
    }
    return str(train(parse_config(tree)).checkpoint)


@pytest.fixture(scope="module")
def beginner(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> str:
    return fine_tuned(tmp_path_factory.mktemp("models") / "beginner", tiny_model, MIXED_UP, steps=30)


@pytest.fixture(scope="module")
def knows_digits(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> str:
    return fine_tuned(tmp_path_factory.mktemp("models") / "digits", tiny_model, DIGITS, steps=30)


@pytest.fixture(scope="module")
def knows_letters(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> str:
    return fine_tuned(tmp_path_factory.mktemp("models") / "letters", tiny_model, LETTERS, steps=30)


@pytest.fixture
def tree(rlvr_tree: dict[str, Any], tmp_path: Path, beginner: str) -> dict[str, Any]:
    """Two domains, half of the prompts of each, and no teacher yet."""
    sources = [
        {"domain": "digits", "kind": "jsonl", "path": write_rows(tmp_path / "digits.jsonl", DIGITS)},
        {"domain": "letters", "kind": "jsonl", "path": write_rows(tmp_path / "letters.jsonl", LETTERS)},
    ]
    rlvr_tree["policy"] |= {"model": beginner, "optim": {"lr": 6e-3}}
    return rlvr_tree | {
        "algorithm": "opd",
        "data": {"train": sources, "eval": sources},
        "rewards": {"default": {"kind": "exact"}},
        "rollout": {"prompts_per_step": 20, "group_size": 8, "max_prompt_tokens": 32, "max_tokens": 6},
        "eval": {"samples": 4, "temperature": 1.0},
    }


def run(tree: dict[str, Any]) -> Outcome:
    return train(parse_config(tree))


def kl_to(teacher: str, student: str | Path, rows: Sequence[dict[str, str]]) -> float:
    """KL(student || teacher) per token of the right answers, over the whole vocabulary."""
    renderer = Renderer(load_tokenizer(teacher))
    talks = [[{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["answer"]}] for r in rows]
    batch = pack([sft_sample(*renderer.training_row(talk)) for talk in talks])  # type: ignore[arg-type]
    models = [load_model(str(name), dtype=torch.float32, device="cpu") for name in (teacher, student)]
    with torch.no_grad():
        said = predict(models[0], batch, Needs(logp=False, top_k=1 << 30), chunk=64)
        batch = batch.replace(target_logp=said.top_logp)
        needs = Needs(logp=False, divergence=Divergence(kind="reverse_kl"))
        return float(required(predict(models[1], batch, needs, chunk=64).divergence).sum()) / batch.num_loss_tokens


def test_a_student_becomes_as_good_as_its_teacher_without_being_told_the_reward(
    tree: dict[str, Any], knows_digits: str, beginner: str
) -> None:
    tree["data"] = {name: sources[:1] for name, sources in tree["data"].items()}
    tree["rollout"]["prompts_per_step"] = 10
    tree |= {"teachers": {"digits": {"model": knows_digits, "devices": "cpu"}}}
    tree["run"]["steps"] = 40
    outcome = run(tree)
    assert outcome.evals[0]["eval/pass@1"] <= 0.3
    assert outcome.evals[40]["eval/pass@1"] >= 0.8
    assert kl_to(knows_digits, outcome.checkpoint, DIGITS) < 0.1 * kl_to(knows_digits, beginner, DIGITS)


@pytest.mark.slow  # That each is heard in its own domain, and how loudly, is tested token by token below.
def test_two_teachers_each_improve_their_own_domain(tree: dict[str, Any], knows_digits: str, knows_letters: str) -> None:
    tree["teachers"] = {
        "one": {"model": knows_digits, "domains": ["digits"], "devices": "cpu"},
        "two": {"model": knows_letters, "domains": ["letters"], "devices": "cpu"},
    }
    tree["run"]["steps"] = 50
    evals = run(tree).evals
    for domain in ("digits", "letters"):
        assert evals[50][f"eval/{domain}/pass@1"] > evals[0][f"eval/{domain}/pass@1"] + 0.5


@dataclass(slots=True)
class Step:
    """What one step handed to the estimator of advantages, and what came out."""

    batch: Batch
    groups: Sequence[Group]
    teacher_advantage: Tensor


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Filled by the runs of the test."""
    seen: list[Step] = []
    original = rlvr.assign_advantages

    def recorded(batch: Batch, episodes: Any, groups: Sequence[Group], config: Any, *, teacher_advantage: Tensor) -> Batch:
        result = original(batch, episodes, groups, config, teacher_advantage=teacher_advantage)
        seen.append(Step(result, groups, teacher_advantage))
        return result

    monkeypatch.setattr(rlvr, "assign_advantages", recorded)
    return seen


def teacher_terms(step: Step, teachers: dict[str, tuple[str, float]], *, temperature: float) -> list[Tensor]:
    """For every trajectory [its tokens], by plain transformers: coef * (log p(teacher) - log p as sampled)."""
    models = {domain: AutoModelForCausalLM.from_pretrained(folder) for domain, (folder, _) in teachers.items()}
    terms = []
    for group in step.groups:
        for trajectory in group.trajectories:
            (turn,) = trajectory.turns
            written = torch.tensor(turn.completion.token_ids)
            if group.prompt.domain not in teachers:
                terms.append(torch.zeros(len(written)))
                continue
            ids = torch.tensor([*turn.prompt_ids, *turn.completion.token_ids])
            with torch.no_grad():
                logits = models[group.prompt.domain](ids[None]).logits[0, len(turn.prompt_ids) - 1 : -1]
            logp = (logits / temperature).log_softmax(-1).gather(1, written[:, None]).squeeze(1)
            coef = teachers[group.prompt.domain][1]
            terms.append(coef * (logp - torch.tensor(turn.completion.logprobs)))
    return terms


def on_written(step: Step, values: Tensor) -> list[Tensor]:
    """[T] -> for every trajectory [its tokens]; zero on all others."""
    assert not values[~step.batch.loss_mask].any()
    lengths = [t.num_completion_tokens for group in step.groups for t in group.trajectories]
    return list(values[step.batch.loss_mask].split(lengths))


def test_each_domain_s_tokens_get_only_their_teacher_s_term(
    tree: dict[str, Any], knows_digits: str, knows_letters: str, steps: list[Step]
) -> None:
    tree["teachers"] = {
        "one": {"model": knows_digits, "domains": ["digits"], "devices": "cpu"},
        "two": {"model": knows_letters, "domains": ["letters"], "coef": 0.5, "devices": "cpu"},
    }
    tree["rollout"]["temperature"] = 0.8
    tree["run"]["steps"] = 1
    run(tree)
    expected = teacher_terms(steps[0], {"digits": (knows_digits, 1.0), "letters": (knows_letters, 0.5)}, temperature=0.8)
    assert {group.prompt.domain for group in steps[0].groups} == {"digits", "letters"}
    for values in (steps[0].teacher_advantage, steps[0].batch.advantage):
        for ours, theirs in zip(on_written(steps[0], values), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_terms_of_teachers_that_share_a_domain_add_up(
    tree: dict[str, Any], knows_digits: str, knows_letters: str, steps: list[Step]
) -> None:
    tree["teachers"] = {
        "one": {"model": knows_digits, "coef": 2.0, "devices": "cpu"},
        "two": {"model": knows_letters, "domains": ["letters"], "devices": "cpu"},
    }
    tree["run"]["steps"] = 1
    run(tree)
    ones = teacher_terms(steps[0], {"digits": (knows_digits, 2.0), "letters": (knows_digits, 2.0)}, temperature=1.0)
    twos = teacher_terms(steps[0], {"letters": (knows_letters, 1.0)}, temperature=1.0)
    for ours, one, two in zip(on_written(steps[0], steps[0].teacher_advantage), ones, twos, strict=True):
        torch.testing.assert_close(ours, one + two, atol=1e-4, rtol=1e-4)


def test_beside_a_reward_the_teacher_s_term_is_added_to_the_advantage(
    tree: dict[str, Any], knows_digits: str, steps: list[Step]
) -> None:
    """A reward less its group's mean on every token, and the teacher's opinion of that token."""
    tree |= {
        "algorithm": "reinforce",
        "teachers": {"digits": {"model": knows_digits, "domains": ["digits"], "coef": 0.3, "devices": "cpu"}},
        "rewards": {"default": {"kind": "import", "path": "reroll_test_rewards:has_digit"}},
    }
    tree["run"]["steps"] = 1
    folder = Path(tree["run"]["runs_dir"]).parent
    train(parse_config(tree, folder=folder), code_folder=folder)
    (step,) = steps
    rewards = [
        trajectory.reward - sum(group.rewards) / len(group.rewards)
        for group in step.groups
        for trajectory in group.trajectories
    ]
    assert any(abs(reward) > 0.05 for reward in rewards)
    terms = teacher_terms(step, {"digits": (knows_digits, 0.3)}, temperature=1.0)
    for ours, reward, term in zip(on_written(step, step.batch.advantage), rewards, terms, strict=True):
        torch.testing.assert_close(ours, reward + term, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("top_k", [0, 8])
def test_over_whole_distributions_the_divergence_from_the_teacher_falls(
    tree: dict[str, Any], knows_digits: str, beginner: str, top_k: int
) -> None:
    tree["data"] = {name: sources[:1] for name, sources in tree["data"].items()}
    tree |= {"algorithm": "gkd", "distill": {"top_k": top_k}, "teachers": {"digits": {"model": knows_digits, "devices": "cpu"}}}
    tree["rollout"] |= {"prompts_per_step": 10, "group_size": 4}
    tree["run"]["steps"] = 15
    outcome = run(tree)
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    divergence = [row["train/teacher_divergence"] for row in rows if "train/teacher_divergence" in row]
    assert len(divergence) == 15
    assert sum(divergence[-3:]) < 0.3 * sum(divergence[:3])
    assert kl_to(knows_digits, outcome.checkpoint, DIGITS) < 0.3 * kl_to(knows_digits, beginner, DIGITS)


def test_over_whole_distributions_a_teacher_of_one_domain_is_followed_there(
    tree: dict[str, Any], knows_digits: str, beginner: str
) -> None:
    tree |= {"algorithm": "gkd", "teachers": {"one": {"model": knows_digits, "domains": ["letters"], "devices": "cpu"}}}
    tree["rollout"] |= {"prompts_per_step": 10, "group_size": 2}
    tree["run"]["steps"] = 12
    outcome = run(tree)
    assert kl_to(knows_digits, outcome.checkpoint, LETTERS) < 0.5 * kl_to(knows_digits, beginner, LETTERS)


def test_a_teacher_with_other_tokens_ends_the_run_before_it_starts(tree: dict[str, Any], tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", characters="0123456789")
    with pytest.raises(ModelError, match="do not share a vocabulary"):
        run(tree | {"teachers": {"stranger": {"model": str(other), "devices": "cpu"}}})


@pytest.mark.parametrize("top_k", [0, 8])
def test_a_full_kl_penalty_starts_at_zero_and_holds_the_policy_back(tree: dict[str, Any], top_k: int) -> None:
    tree |= {"algorithm": "reinforce", "kl": {"coef": 0.0, "estimator": "full", "top_k": top_k}}
    tree["run"]["steps"] = 8
    tree["policy"]["optim"] = {"lr": 2e-3}  # Above, the last bit of a gradient decides how far a step goes.
    tree["rollout"] |= {"prompts_per_step": 10, "group_size": 4}
    distances = {}
    for coef in (1e-6, 3.0):
        tree["kl"]["coef"], tree["run"]["name"] = coef, f"kl-{coef}"
        outcome = run(tree)
        rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
        distances[coef] = [row["train/kl_ref"] for row in rows if "train/kl_ref" in row]
        assert distances[coef][0] == pytest.approx(0.0, abs=1e-6)
    assert 0 < sum(distances[3.0][3:]) < 0.3 * sum(distances[1e-6][3:])
