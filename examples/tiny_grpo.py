"""GRPO from start to finish in one file: no library, only PyTorch, about a minute on a laptop CPU.

A tiny transformer learns to sort digits: "31415=" should become "11345". First it imitates a few hundred worked examples,
which teaches it the shape of an answer but not enough to be right. Then reinforcement learning takes over: the model
answers the same question many times, a one-line checker says which answers are right, and the model is nudged towards
those. No answer is ever shown to it again. That is the whole idea; the rest of this file spells it out.

    python examples/tiny_grpo.py
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

# ------------------------------------------------------------------------------------------------------- the task

VOCAB = "0123456789="  # a token is a character, its id is its place here
NUM_DIGITS = 5  # every question has as many, so that questions and answers line up without padding
PROMPT_LENGTH = NUM_DIGITS + 1  # the digits and "="


def make_prompts(num_prompts: int, rng: random.Random, *, held_out: bool = False) -> Tensor:
    """Questions as token ids, [prompts, PROMPT_LENGTH]. Those whose digits add up to 0, 10, 20, ... are kept for the test."""
    rows: list[list[int]] = []
    while len(rows) < num_prompts:
        digits = [rng.randrange(10) for _ in range(NUM_DIGITS)]
        if (sum(digits) % 10 == 0) == held_out:
            rows.append([*digits, VOCAB.index("=")])
    return torch.tensor(rows)


def right_answers(prompts: Tensor) -> Tensor:
    """[prompts, NUM_DIGITS]"""
    return prompts[:, :NUM_DIGITS].sort(dim=1).values


def reward(prompts: Tensor, answers: Tensor) -> Tensor:
    """1 for a right answer, 0 for any other. This is all that reinforcement learning gets to know about the task."""
    return (answers == right_answers(prompts)).all(dim=1).float()


# ------------------------------------------------------------------------------------------------------ the policy


class Block(nn.Module):
    """Attention, then a small network, each added to what came in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    """A transformer that gives, for each position, the logits of the next token."""

    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(len(VOCAB), width)
        self.place = nn.Embedding(PROMPT_LENGTH + NUM_DIGITS, width)
        self.blocks = nn.Sequential(*[Block(width, num_heads) for _ in range(num_layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(VOCAB)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(ids) + self.place(torch.arange(ids.shape[1]))))


def answer_logprobs(policy: Policy, prompts: Tensor, answers: Tensor) -> Tensor:
    """How likely the policy finds each token of these answers, as log-probabilities [rows, NUM_DIGITS]."""
    ids = torch.cat([prompts, answers], dim=1)
    logits = policy(ids[:, :-1])[:, PROMPT_LENGTH - 1 :]  # position t predicts token t + 1
    return logits.log_softmax(dim=-1).gather(2, answers.unsqueeze(2)).squeeze(2)


@torch.no_grad()
def generate(policy: Policy, prompts: Tensor, *, greedy: bool = False) -> tuple[Tensor, Tensor]:
    """Answer each prompt, one token at a time. Returns the answers and the log-probability of each of their tokens."""
    ids, logprobs = prompts, []
    for _ in range(NUM_DIGITS):
        logp = policy(ids)[:, -1].log_softmax(dim=1)
        token = logp.argmax(dim=1, keepdim=True) if greedy else torch.multinomial(logp.exp(), num_samples=1)
        ids = torch.cat([ids, token], dim=1)
        logprobs.append(logp.gather(1, token))
    return ids[:, PROMPT_LENGTH:], torch.cat(logprobs, dim=1)


def pass_rate(policy: Policy, prompts: Tensor) -> float:
    """The share of prompts that the policy's best guess gets right."""
    answers, _ = generate(policy, prompts, greedy=True)
    return reward(prompts, answers).mean().item()


# -------------------------------------------------------------------------------------- stage 1: imitate examples


def warm_up(policy: Policy, prompts: Tensor, *, num_steps: int, rows_per_step: int = 64, lr: float = 1e-3) -> None:
    """Supervised fine-tuning: make the worked examples likely.

    Reinforcement learning can only strengthen what the policy already does now and then. A policy that is never right has
    nothing to be strengthened, so it needs a start.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    for _ in range(num_steps):
        rows = prompts[torch.randint(len(prompts), (rows_per_step,))]
        loss = -answer_logprobs(policy, rows, right_answers(rows)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------- stage 2: GRPO


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """How much better each answer is than its siblings, the other answers to the same question.

    A hard question and an easy one thus count the same: what matters is to be better than oneself. If all siblings earn
    the same there is nothing to learn from them, and their advantage is 0.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()


def clipped_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """Make tokens of good answers likelier and tokens of bad answers less likely, but not by much at once.

    `ratio` says how much likelier a token has become since it was sampled. Once it has moved by more than `clip` in the
    wanted direction its gradient stops: the answers were sampled by a policy that this one must still resemble.
    """
    ratio = (logp - old_logp).exp()
    wanted = ratio * advantages.unsqueeze(1)
    limited = ratio.clamp(1 - clip, 1 + clip) * advantages.unsqueeze(1)
    return -torch.minimum(wanted, limited).mean()


def grpo_step(
    policy: Policy, optimizer: torch.optim.Optimizer, prompts: Tensor, *, group_size: int, num_updates: int, clip: float
) -> float:
    """Sample, judge, compare, update. Returns the mean reward of the samples."""
    prompts = prompts.repeat_interleave(group_size, dim=0)  # siblings lie next to each other
    answers, old_logp = generate(policy, prompts)
    rewards = reward(prompts, answers)
    advantages = group_advantages(rewards, group_size)
    for part in torch.randperm(len(prompts)).chunk(num_updates):
        logp = answer_logprobs(policy, prompts[part], answers[part])
        loss = clipped_loss(logp, old_logp[part], advantages[part], clip=clip)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return rewards.mean().item()


def train(*, seed: int, warm_up_steps: int, grpo_steps: int) -> tuple[float, float]:
    """Both stages. Returns the pass rate on questions never trained on, before and after GRPO."""
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    torch.manual_seed(seed)
    rng = random.Random(seed)
    held_out, examples = make_prompts(500, rng, held_out=True), make_prompts(500, rng)
    policy = Policy()

    start = time.perf_counter()
    warm_up(policy, examples, num_steps=warm_up_steps)
    before = pass_rate(policy, held_out)
    print(f"after imitation: {before:.1%} of held-out questions right ({time.perf_counter() - start:.0f} s)")

    optimizer = torch.optim.AdamW(policy.parameters(), lr=7e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=grpo_steps)
    for step in range(1, grpo_steps + 1):
        mean_reward = grpo_step(policy, optimizer, make_prompts(64, rng), group_size=8, num_updates=4, clip=0.2)
        schedule.step()
        if step % 25 == 0:
            print(f"step {step:4d}: reward {mean_reward:.2f}, held-out {pass_rate(policy, held_out):.1%}")
    after = pass_rate(policy, held_out)
    print(f"after GRPO:      {after:.1%} of held-out questions right ({time.perf_counter() - start:.0f} s)")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up-steps", type=int, default=50)
    parser.add_argument("--grpo-steps", type=int, default=200)
    arguments = parser.parse_args()
    train(seed=arguments.seed, warm_up_steps=arguments.warm_up_steps, grpo_steps=arguments.grpo_steps)
