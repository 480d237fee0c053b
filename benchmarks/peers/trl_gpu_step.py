"""GRPO steps with TRL and a colocated vLLM on the shared work for a GPU. Usage: trl_gpu_step.py MODEL_FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from trl_run import run

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_work import NUM_NEW_TOKENS, NUM_PROMPTS, NUM_SIBLINGS, NUM_STEPS, NUM_TOKENS, WARM_UP, prompts, reward_of
from work import messages

MICRO_BATCH = 64
"""Samples that go through the model at once: their logits are what fills the memory."""


def main() -> None:
    run(
        sys.argv[1],
        [messages(prompt) for prompt in prompts()],
        reward_of,
        warm_up=WARM_UP,
        num_tokens=NUM_NEW_TOKENS,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=NUM_PROMPTS * NUM_SIBLINGS // MICRO_BATCH,
        num_generations=NUM_SIBLINGS,
        max_completion_length=NUM_TOKENS,
        generation_kwargs={"min_tokens": NUM_TOKENS},
        max_steps=NUM_STEPS,
        bf16=True,
        model_init_kwargs={"dtype": torch.bfloat16},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=1024,
    )


if __name__ == "__main__":
    main()
