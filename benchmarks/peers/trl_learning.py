"""Learning with TRL on `learning_tasks`. Usage: trl_learning.py JSON, by `learning_trl.py`; the model goes to its `out`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from learning_tasks import GROUP_SIZE, MAX_TOKENS, PROMPTS_PER_STEP, reward_of, to_train
from work import messages


def reward(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: object) -> list[float]:
    return [reward_of(completion[0]["content"], right) for completion, right in zip(completions, answer, strict=True)]


def main() -> None:
    asked = json.loads(sys.argv[1])
    rows = to_train(asked["task"], seed=asked["seed"], num=PROMPTS_PER_STEP * asked["steps"])
    on_cpu = asked["device"] == "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=asked["model"],
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=scratch,
                seed=asked["seed"],
                learning_rate=asked["lr"],
                per_device_train_batch_size=PROMPTS_PER_STEP * GROUP_SIZE,
                num_generations=GROUP_SIZE,
                max_completion_length=MAX_TOKENS,
                max_steps=asked["steps"],
                shuffle_dataset=False,
                gradient_checkpointing=False,
                beta=0.0,
                use_cpu=on_cpu,
                bf16=not on_cpu,  # Autocast over fp32 weights, which is what TRL does when it is asked for nothing.
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                **asked["arm"],
            ),
            train_dataset=Dataset.from_list([{"prompt": messages(row["prompt"]), "answer": row["answer"]} for row in rows]),
        )
        trainer.train()
        trainer.save_model(asked["out"])
        trainer.processing_class.save_pretrained(asked["out"])
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("RESULT " + json.dumps({"rewards": rewards}), flush=True)


if __name__ == "__main__":
    main()
