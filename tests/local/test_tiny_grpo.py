import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_grpo.py"


@pytest.fixture(scope="module")
def tiny_grpo():
    spec = importlib.util.spec_from_file_location("tiny_grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_learns_in_a_few_steps(tiny_grpo, capsys):
    num_threads = torch.get_num_threads()
    try:
        before, after = tiny_grpo.train(seed=0, warm_up_steps=50, grpo_steps=25)
    finally:
        torch.set_num_threads(num_threads)
    assert 0.1 < before < 0.65
    assert after > before + 0.15
    assert f"{after:.1%} of held-out questions right" in capsys.readouterr().out


def test_the_checker_pays_for_sorted_digits_only(tiny_grpo):
    prompts = torch.tensor([[3, 1, 4, 1, 5, 10]] * 3)
    answers = torch.tensor([[1, 1, 3, 4, 5], [1, 1, 3, 5, 4], [1, 1, 3, 4, 10]])
    assert tiny_grpo.reward(prompts, answers).tolist() == [1.0, 0.0, 0.0]


def test_advantages_compare_siblings_and_vanish_where_all_are_equal(tiny_grpo):
    advantages = tiny_grpo.group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), 4)
    assert advantages[:4].tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    assert advantages[4:].tolist() == [0.0] * 4


def test_the_loss_stops_pushing_a_token_that_has_moved_far_enough(tiny_grpo):
    old_logp = torch.zeros(2, 1)
    logp = torch.tensor([[0.5], [-0.5]], requires_grad=True)
    tiny_grpo.clipped_loss(logp, old_logp, torch.tensor([1.0, -1.0]), clip=0.2).backward()
    assert logp.grad.flatten().tolist() == [0.0, 0.0]
    logp = torch.tensor([[-0.5], [0.5]], requires_grad=True)
    tiny_grpo.clipped_loss(logp, old_logp, torch.tensor([1.0, -1.0]), clip=0.2).backward()
    assert (logp.grad.flatten() * torch.tensor([-1.0, 1.0]) > 0).all()


def test_log_probs_as_sampled_are_those_of_the_training_pass(tiny_grpo):
    torch.manual_seed(0)
    policy = tiny_grpo.Policy()
    prompts = torch.randint(10, (6, tiny_grpo.PROMPT_LENGTH))
    answers, logp = tiny_grpo.generate(policy, prompts)
    torch.testing.assert_close(tiny_grpo.answer_logprobs(policy, prompts, answers), logp)
