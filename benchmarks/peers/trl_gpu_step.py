"""GRPO steps with TRL and a colocated vLLM on the shared work for a GPU. Usage: trl_gpu_step.py MODEL_FOLDER"""

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
from gpu_work import NUM_NEW_TOKENS, NUM_PROMPTS, NUM_SIBLINGS, NUM_STEPS, NUM_TOKENS, WARM_UP, messages, prompts, reward_of

MICRO_BATCH = 64
"""Samples that go through the model at once: their logits are what fills the memory."""


def reward(completions: list[list[dict[str, str]]], **kwargs: object) -> list[float]:
    return [reward_of(completion[0]["content"]) for completion in completions]


def main() -> None:
    folder, times = sys.argv[1], StepTimes()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=MICRO_BATCH,
                gradient_accumulation_steps=NUM_PROMPTS * NUM_SIBLINGS // MICRO_BATCH,
                num_generations=NUM_SIBLINGS,
                max_completion_length=NUM_TOKENS,
                generation_kwargs={"min_tokens": NUM_TOKENS},
                max_steps=NUM_STEPS,
                learning_rate=1e-6,
                beta=0.0,
                bf16=True,
                model_init_kwargs={"dtype": torch.bfloat16},
                gradient_checkpointing=False,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=0.3,
                vllm_max_model_length=1024,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
            ),
            train_dataset=Dataset.from_list([{"prompt": messages(prompt)} for prompt in prompts()]),
            callbacks=[times],
        )
        trainer.train()
    print("RESULT " + json.dumps({"seconds": statistics.median(times.seconds[WARM_UP:]), "tokens": NUM_NEW_TOKENS}), flush=True)


if __name__ == "__main__":
    main()
