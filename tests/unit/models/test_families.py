"""Families of models beside Hugging Face's own: packed training, gradients, generation, pushed weights."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))  # scripts, no package

from model_families import FAMILIES, measure

from reroll.config.host import model_card
from reroll.config.recurrent import MIXERS, carries_state
from reroll.models.load import skeleton
from reroll.models.recurrent import is_recurrent
from reroll_zoo.tiny_models import make_tiny

REFUSED = {
    "deepseek_v32", "deepseek_v4", "diffllama", "doge", "glm_moe_dsa", "hrm_text", "jamba", "llama4_text", "minimax",
    "nemotron", "phimoe", "recurrent_gemma", "stablelm",
}  # fmt: skip
REFUSED_BY_ENGINE = {"gemma4_text", "mimo_v2_flash"}
QUICK = {
    "hunyuan_v1_moe",
    "deepseek_v3",
    "gpt_oss",
    "gpt_neox",
    "gemma3_text",
    "qwen3_next",
    "nemotron_h",
    "kimi_linear",
    "lfm2",
}
"""What no other test has: latent attention, sinks, heads that share no keys, norms of queries under windows, states beside
experts, latent attention or short convolutions."""


def families(names):
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("family", families([name for name in FAMILIES if name not in REFUSED | REFUSED_BY_ENGINE]))
def test_a_family_trains_and_writes_as_hugging_faces_own_before_and_after_a_push(tmp_path, family):
    found = measure(family, tmp_path, training=True)
    if "need a later transformers" in found.refused:
        pytest.skip(found.refused)
    assert found.agrees, found
    assert not found.engine_refused


@pytest.mark.parametrize("family", families(["llama", "gpt_oss", "hunyuan_v1_moe"]))
def test_bf16_is_about_as_far_from_fp32_as_hugging_faces_own(tmp_path, family):
    found = measure(family, tmp_path, half=True)
    assert found.agrees, found
    assert min(found.half, found.engine_half) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(REFUSED_BY_ENGINE))
def test_a_family_whose_layers_differ_is_trained_and_refused_by_the_embedded_engine(tmp_path, family):
    found = measure(family, tmp_path)
    assert found.agrees, found
    assert "engine.kind" in found.engine_refused


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in {"diffllama"} else [pytest.mark.slow]) for name in sorted(REFUSED)]
)
def test_a_family_that_would_go_wrong_is_refused_by_name(tmp_path, family):
    assert family in measure(family, tmp_path).refused


def test_a_config_tells_of_states_what_the_layers_of_its_model_tell(tmp_path):
    attending = {"layer_types": ["full_attention"] * 3}
    cases = [(family, FAMILIES[family]) for family in (*MIXERS, "llama")] + [("lfm2", attending), ("qwen3_next", attending)]
    for number, (family, options) in enumerate(cases):
        folder = make_tiny(tmp_path / str(number), family=family, **{"hidden": 32, "layers": 3, **options})
        carries = carries_state(model_card(str(folder)))
        assert carries == is_recurrent(skeleton(str(folder))), family
        assert carries == (family in MIXERS and options != attending), family
