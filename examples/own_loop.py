"""The RL step as a loop of your own: the components are reroll's, every line of the algorithm is yours to change.

python examples/own_loop.py          # a tiny model learns to answer with an even digit, in a minute on a laptop
"""

import asyncio
import tempfile
from pathlib import Path

import torch

import reroll
from reroll_zoo.tiny_models import make_tiny


def even(prompt: reroll.Prompt, trajectory: reroll.Trajectory) -> float:
    """The share of even digits in the answer."""
    return sum(letter in "02468" for letter in trajectory.text) / max(1, len(trajectory.text))


def centred(groups: list[reroll.Group], episodes: reroll.Episodes) -> torch.Tensor:
    """[T]: what each sample earned beyond the mean of its siblings, at every token that it wrote."""
    advantages = [reward - sum(group.rewards) / len(group.rewards) for group in groups for reward in group.rewards]
    return episodes.spread(torch.tensor(advantages))


async def learn(config: reroll.RlvrConfig) -> list[float]:
    """The mean reward of every step."""
    loss, curve = reroll.PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2}), []
    async with reroll.build(config) as parts:
        await parts.weights.push(version=0)
        for step in range(config.run.steps):
            groups = await parts.rollouts.take(config.rollout.prompts_per_step)
            samples, episodes = reroll.rows_of(groups)
            batch = reroll.pack(samples).replace(advantage=centred(groups, episodes))
            async with parts.devices.lease("policy"):
                stats = await parts.policy.train(batch, loss, seed=step)
            async with parts.devices.lease("engine"):
                await parts.weights.push(version=step + 1)
            parts.rollouts.release(groups, version=step + 1)  # Slots free only now: nothing is born stale.

            rewards = [reward for group in groups for reward in group.rewards]
            curve.append(sum(rewards) / len(rewards))
            print(f"step {step + 1:3d}  reward {curve[-1]:.3f}  gradient {stats.values_by_name()['train/grad_norm']:.3f}")
    return curve


def main(steps: int = 60) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder) / "tiny", characters="0123456789 ")
        rows = [{"prompt": str(number)} for number in range(10)]
        config = reroll.make_config(
            model=str(model), data=rows, reward=even, steps=steps, lr=3e-3, prompts_per_step=4, group_size=8, max_tokens=8,
            run={"runs_dir": folder},
        )  # fmt: skip
        return asyncio.run(learn(config))


if __name__ == "__main__":
    main()
