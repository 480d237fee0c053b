"""What all of TRL's contestants do: train for some steps on prompts, time them, and print the result for the parent process."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)


def run(
    folder: str,
    prompts: Sequence[list[dict[str, str]]],
    reward_of: Callable[[str], float],
    *,
    warm_up: int,
    num_tokens: int,
    **options: Any,
) -> None:
    """GRPO on the model in `folder`; `warm_up` steps are not counted. `options` are fields of TRL's config."""

    def reward(completions: list[list[dict[str, str]]], **kwargs: object) -> list[float]:
        return [reward_of(completion[0]["content"]) for completion in completions]

    times = StepTimes()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=scratch,
                learning_rate=1e-6,
                beta=0.0,
                gradient_checkpointing=False,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                **options,
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            callbacks=[times],
        )
        trainer.train()
    found = {"seconds": statistics.median(times.seconds[warm_up:]), "first_s": times.seconds[0], "tokens": num_tokens}
    if torch.cuda.is_available():
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print("RESULT " + json.dumps(found), flush=True)
