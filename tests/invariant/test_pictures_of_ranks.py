"""Ranks that hold a model together see what one process sees: fp32, real processes, gloo."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel_bench import Scenario, assert_same, fsdp2, model_config, played_alone, played_by_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "zoo" / "vision"))  # no package

from vision_fakes import picture

from reroll.models.load import load_tokenizer
from reroll.tokens.batch import Batch, pack
from reroll.tokens.pictures import FIRST_ID
from reroll.tokens.renderer import Renderer
from reroll.types import Sample
from reroll_zoo.vision.parts import message
from reroll_zoo.vision.tiny import VisionFamily, make_tiny_vision


@dataclass(frozen=True, kw_only=True)
class Seeing(Scenario):
    """Siblings that are asked about two pictures, and one row that shows none: its rank sees nothing in its pass."""

    def rows(self, seed: int) -> Batch:
        rng, renderer = np.random.default_rng(seed), Renderer(load_tokenizer(self.config.model))
        shown = renderer.start([message("user", picture(0), " and ", picture(1, 40, 20))])
        prompts = [shown, shown, renderer.start([message("user", picture(2), "?")]), renderer.start([message("user", "none")])]
        samples, advantages = [], []
        for prompt in prompts:
            ids = np.concatenate([np.array(prompt), rng.integers(4, 90, size=6)])
            mask = np.arange(len(ids)) >= len(prompt)
            logp = np.where(mask, rng.normal(-4.5, 0.1, size=len(ids)), 0).astype(np.float32)
            samples.append(Sample(ids=ids, loss_mask=mask, logp=logp, turn=np.where(mask, 0, -1)))
            advantages.append(np.where(mask, rng.normal(), 0).astype(np.float32))
        packed = pack(samples).replace(advantage=torch.from_numpy(np.concatenate(advantages)))
        assert (packed.ids >= FIRST_ID).any()
        return packed.replace(ref_logp=packed.logp)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", pytest.param("smolvlm", marks=pytest.mark.slow), pytest.param("gemma3", marks=pytest.mark.slow)]
)
def test_two_ranks_learn_from_pictures_what_one_process_learns(tmp_path: Path, family: VisionFamily) -> None:
    folder = make_tiny_vision(tmp_path / "model", family=family, seed=1, hidden=32, vision_hidden=32)
    config = model_config(folder, fsdp2())
    ours = played_by_ranks(Seeing(config=config, save=tmp_path / "saved"), 2)
    expected = played_alone(config, Seeing)
    assert_same(ours, expected)
    assert ours.num_held < 0.6 * expected.num_held
    again = model_config(tmp_path / "saved", fsdp2())  # Weights, tower and image processor.
    torch.testing.assert_close(played_alone(again, Seeing, steps=range(0)).answers, ours.answers, rtol=1e-5, atol=2e-5)
