"""How long TRL's steps take."""

from __future__ import annotations

import time

import torch
from transformers import TrainerCallback


class StepTimes(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)
