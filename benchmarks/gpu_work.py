"""The work that the comparisons on a GPU share. No reroll imports: the peers' processes read it too."""

from __future__ import annotations

import json
import random
import string
from dataclasses import asdict, dataclass
from typing import Any, Literal

WARM_UP = 2
"""Training steps that are run and not counted: kernels are compiled, graphs captured."""
TEMPLATE_TOKENS = 6
"""What the chat format of `gpu_shapes` puts around a prompt."""
_letters = random.Random(0)
WORDS = tuple(dict.fromkeys(" " + "".join(_letters.choices(string.ascii_lowercase, k=5)) for _ in range(2000)))
"""Each is one token of the models that `gpu_shapes` writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of each training step; all samples are as long."""

    prompts: int = 64
    siblings: int = 8
    prompt_tokens: int = 100
    tokens: int = 256
    steps: int = 5
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def num_samples(self) -> int:
        return self.prompts * self.siblings

    @property
    def num_new_tokens(self) -> int:
        return self.num_samples * self.tokens

    @property
    def num_distinct_tokens(self) -> int:
        """What an update computes that meets each prompt once."""
        return self.num_new_tokens + self.prompts * self.prompt_tokens

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.tokens

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    def told(self) -> str:
        return f"{self.prompts} prompts of {self.prompt_tokens:,} tokens × {self.siblings} siblings × {self.tokens:,} tokens"


def work_of(argument: str) -> Work:
    return Work(**json.loads(argument))


def prompts(work: Work) -> list[str]:
    """Enough for all steps."""
    draw = random.Random(0)
    num_words = work.prompt_tokens - TEMPLATE_TOKENS
    return ["".join(draw.choices(WORDS, k=num_words)) for _ in range(work.prompts * work.steps)]


def reward_of(text: str) -> float:
    return text.count("e") / 100


def score(prompt: object, trajectory: Any) -> float:
    """The same, as reroll asks: a module that loads nothing is imported in a moment by every process that judges."""
    return reward_of(trajectory.text)
