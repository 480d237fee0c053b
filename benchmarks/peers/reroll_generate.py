"""reroll's embedded engine, behind its worker and router as a run uses it, on the shared work.

Usage: reroll_generate.py MODEL_FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from work import NUM_SIBLINGS, NUM_TOKENS, QUESTIONS, messages, report

from reroll.config.parts import EmbeddedEngineConfig, PolicyConfig
from reroll.models.load import load_tokenizer
from reroll.pipeline.episode_runner import spawn_engine
from reroll.runtime.local import LocalRuntime
from reroll.tokens.renderer import Renderer
from reroll.types import Request, SamplingParams


def main() -> None:
    folder = sys.argv[1]
    renderer = Renderer(load_tokenizer(folder))
    prompts = [renderer.start(messages(question)) for question in QUESTIONS]  # type: ignore[arg-type]
    requests = [
        Request(
            id=f"{number}.{sibling}",
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, seed=number * NUM_SIBLINGS + sibling),
        )
        for number, prompt in enumerate(prompts)
        for sibling in range(NUM_SIBLINGS)
    ]
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(
        spawn_engine(LocalRuntime(), EmbeddedEngineConfig(precision="bf16", devices="cpu"), PolicyConfig(model=folder))
    )

    async def generate() -> int:
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        return sum(len(completion.token_ids) for completion in completions)

    report(lambda: loop.run_until_complete(generate()))
    loop.run_until_complete(engine.close())


main()
