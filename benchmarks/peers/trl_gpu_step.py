"""GRPO steps with TRL on the shared work, on a GPU with a colocated vLLM. Usage: trl_gpu_step.py MODEL_FOLDER WORK"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from trl_run import run

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_work import WARM_UP, Work, prompts, reward_of, work_of
from work import messages

MICRO_BATCH_TOKENS = 24_000
"""Of samples that go through the model at once: their logits are what fills the memory."""


def micro_batch(work: Work) -> int:
    """Samples; a power of two."""
    most = max(1, MICRO_BATCH_TOKENS // work.row_tokens)
    return int(min(work.num_samples, 2 ** (most.bit_length() - 1)))


def engine(work: Work) -> dict[str, Any]:
    """vLLM; on a CPU transformers' own."""
    if work.device == "cpu":
        return {"use_cpu": True, "generation_kwargs": {"min_new_tokens": work.tokens}}
    return {
        "generation_kwargs": {"min_tokens": work.tokens},
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": max(1024, work.row_tokens + 64),
    }


def main() -> None:
    work = work_of(sys.argv[2])
    run(
        sys.argv[1],
        [messages(prompt) for prompt in prompts(work)],
        reward_of,
        warm_up=WARM_UP,
        num_tokens=work.num_new_tokens,
        per_device_train_batch_size=micro_batch(work),
        gradient_accumulation_steps=work.num_samples // micro_batch(work),
        num_generations=work.siblings,
        max_completion_length=work.tokens,
        max_steps=work.steps,
        bf16=True,
        model_init_kwargs={"dtype": torch.bfloat16},
        **engine(work),
    )


if __name__ == "__main__":
    main()
