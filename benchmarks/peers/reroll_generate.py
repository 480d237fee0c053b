"""reroll's embedded engine on the shared work. Usage: reroll_generate.py MODEL_FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from work import NUM_SIBLINGS, NUM_TOKENS, QUESTIONS, messages, report

from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.renderer import Renderer
from reroll.types import Request, SamplingParams

folder = sys.argv[1]
tokenizer = load_tokenizer(folder)
engine = EmbeddedEngine(load_model(folder, dtype=torch.bfloat16, device="cpu"), tokenizer, max_running=64)
renderer = Renderer(tokenizer)
prompts = [renderer.start(messages(question)) for question in QUESTIONS]  # type: ignore[arg-type]


def run() -> int:
    for number, prompt in enumerate(prompts):
        for sibling in range(NUM_SIBLINGS):
            sampling = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, seed=number * NUM_SIBLINGS + sibling)
            engine.submit(Request(id=f"{number}.{sibling}", prompt_ids=prompt, sampling=sampling))
    num_tokens = 0
    while engine.num_unfinished:
        num_tokens += sum(len(finished.completion.token_ids) for finished in engine.step())
    return num_tokens


report(run)
