"""GRPO steps with TRL on the shared work. Usage: trl_step.py MODEL_FOLDER bf16|fp32"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from trl_run import run

sys.path.insert(0, str(Path(__file__).parents[1]))
from work import NUM_NEW_TOKENS, NUM_SIBLINGS, NUM_TOKENS, QUESTIONS, WARM_UP, messages

NUM_STEPS = 4


def main() -> None:
    folder, precision = sys.argv[1:3]
    run(
        folder,
        [messages(question) for question in QUESTIONS * NUM_STEPS],
        lambda text: text.count("e") / 20,
        warm_up=WARM_UP,
        num_tokens=NUM_NEW_TOKENS,
        per_device_train_batch_size=len(QUESTIONS) * NUM_SIBLINGS,
        num_generations=NUM_SIBLINGS,
        max_completion_length=NUM_TOKENS,
        generation_kwargs={"min_new_tokens": NUM_TOKENS},
        max_steps=NUM_STEPS,
        use_cpu=True,
        bf16=precision == "bf16",
        model_init_kwargs={"dtype": torch.float32},
    )


main()
