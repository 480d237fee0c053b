"""GRPO steps with TRL on the shared work. Usage: trl_step.py MODEL_FOLDER bf16|fp32"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from step_times import StepTimes
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from work import NUM_NEW_TOKENS, NUM_SIBLINGS, NUM_TOKENS, QUESTIONS, WARM_UP, messages

NUM_STEPS = 4


def reward(completions: list[list[dict[str, str]]], **kwargs: object) -> list[float]:
    return [completion[0]["content"].count("e") / 20 for completion in completions]


def main() -> None:
    folder, precision = sys.argv[1:3]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=len(QUESTIONS) * NUM_SIBLINGS,
                num_generations=NUM_SIBLINGS,
                max_completion_length=NUM_TOKENS,
                generation_kwargs={"min_new_tokens": NUM_TOKENS},
                max_steps=NUM_STEPS,
                learning_rate=1e-6,
                beta=0.0,
                use_cpu=True,
                bf16=precision == "bf16",
                model_init_kwargs={"dtype": torch.float32},
                gradient_checkpointing=False,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
            ),
            train_dataset=Dataset.from_list([{"prompt": messages(question)} for question in QUESTIONS * NUM_STEPS]),
            callbacks=[times],
        )
        trainer.train()
    print("RESULT " + json.dumps({"seconds": statistics.median(times.seconds[WARM_UP:]), "tokens": NUM_NEW_TOKENS}), flush=True)


main()
