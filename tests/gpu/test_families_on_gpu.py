"""Families of models on a GPU beside Hugging Face's own there: fp32, bf16, pictures, and layers that carry a state.

`scripts/model_families.py --device cuda` does the first two for all families.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))  # no packages
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "zoo" / "vision"))

from model_families import measure
from vision_fakes import picture

from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.attention import logits
from reroll.models.load import load_model, load_tokenizer
from reroll.tokens.batch import pack
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.training.predict import token_states
from reroll.types import Request, SamplingParams
from reroll_zoo.vision.parts import message
from reroll_zoo.vision.tiny import make_tiny_vision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2"])
def test_a_family_trains_and_writes_on_a_gpu_as_hugging_faces_own(tmp_path, family):
    found = measure(family, tmp_path, training=True, half=True, device="cuda")
    if "does not know" in found.refused or "need a later transformers" in found.refused:
        pytest.skip(found.refused)
    assert found.agrees, found


def logp_of(model, rows):
    batch = pack([sft_sample(row, [place > 0 for place in range(len(row))]) for row in rows]).to(str(model.device))
    with torch.no_grad():
        return logits(model, token_states(model, batch).hidden).float().log_softmax(-1).cpu()


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_vl", "gemma3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_pictures_are_seen_on_a_gpu_as_on_a_cpu_by_trainer_and_engine(tmp_path, family, dtype, tolerance):
    folder = str(make_tiny_vision(tmp_path, family=family, seed=1, hidden=128))
    tokenizer = load_tokenizer(folder)
    renderer = Renderer(tokenizer)
    prompts = [renderer.start([message("user", "What? ", picture(0), " and ", picture(each, 40, 20))]) for each in (1, 2)]
    prompts = [prompts[0], prompts[0], prompts[1], renderer.start([message("user", "no picture")])]
    model = load_model(folder, dtype=dtype, device="cuda")
    want = logp_of(load_model(folder, dtype=torch.float32, device="cpu"), prompts)
    assert (logp_of(model, prompts) - want).abs().max() < tolerance
    engine = EmbeddedEngine(load_model(folder, dtype=dtype, device="cuda"), tokenizer, max_running=3)
    for number, prompt in enumerate(prompts):
        engine.submit(
            Request(id=str(number), prompt_ids=prompt, sampling=SamplingParams(max_tokens=8, min_tokens=8, seed=number))
        )
    done = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    for number, prompt in enumerate(prompts):
        completion = done[str(number)]
        new = torch.tensor(completion.token_ids)
        logp = logp_of(model, [(*prompt, *completion.token_ids)])[len(prompt) - 1 : -1]
        gap = logp.gather(1, new[:, None])[:, 0] - torch.tensor(completion.logprobs)
        assert gap.abs().max() < tolerance
