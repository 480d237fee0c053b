"""What shows models no pictures refuses those that see, before anything starts."""

import importlib.util
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from vision_fakes import picture

from reroll.config.load import parse_config
from reroll.config.parts import PolicyConfig
from reroll.errors import ConfigError, ModelError
from reroll.models.load import load_tokenizer
from reroll.tokens.renderer import Renderer
from reroll_zoo.external_engine.weights import HFWeightAssembler
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.opening import _open_model
from reroll_zoo.ranks.empty_model import skeleton
from reroll_zoo.tiny_models import make_tiny
from reroll_zoo.vision.families import FAMILIES
from reroll_zoo.vision.kinds import SEEING, seeing_family
from reroll_zoo.vision.parts import message
from reroll_zoo.vision.tiny import make_tiny_vision


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_vision(tmp_path_factory.mktemp("models") / "seeing", family="qwen3_vl", hidden=32, vision_hidden=32))


@pytest.fixture
def all_installed(monkeypatch):
    """As if vLLM were there: checks look for it, and do not import it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object() if name == "vllm" else find(name, *rest))


def problems(tree, model, **fields):
    policy = {**tree["policy"], "model": model, **fields.pop("policy", {})}
    try:
        parse_config({**tree, **fields, "policy": policy}, folder=Path(tree["run"]["runs_dir"]).parent)
    except ConfigError as error:
        return {violation.path: str(violation) for violation in error.violations}
    return {}


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_that_show_no_pictures_refuse_a_model_that_sees(rlvr_tree, model, tiny_model, kind):
    engine = {"kind": kind, **({"python": "python3"} if kind == "sglang" else {})}
    assert "models of family qwen3_vl see" in problems(rlvr_tree, model, engine=engine)["engine.kind"]
    assert "engine.kind" not in problems(rlvr_tree, str(tiny_model), engine=engine)
    assert not problems(rlvr_tree, model)


def test_ranks_that_are_shown_no_pictures_refuse_a_model_that_sees(rlvr_tree, model, tiny_model):
    fields = {"runtime": {"kind": "processes"}, "policy": {"strategy": {"kind": "deepspeed", "num_ranks": 2}}}
    where = "policy.strategy.kind"
    assert "models of family qwen3_vl see (set it to torch)" in problems(rlvr_tree, model, **fields)[where]
    assert "see" not in problems(rlvr_tree, str(tiny_model), **fields).get(where, "")


@pytest.mark.parametrize(
    ("strategy", "policy", "where"),
    [
        ({"sp": 2}, {}, "policy.strategy.sp"),
        ({"tp": 2}, {}, "policy.strategy.tp"),
        ({}, {"train_vision": True}, "policy.train_vision"),
    ],
)
def test_ranks_that_see_share_no_sequence_and_no_layer_and_train_no_tower(rlvr_tree, model, strategy, policy, where):
    strategy = {"kind": "fsdp2", "num_ranks": 2, **strategy}
    fields = {"runtime": {"kind": "processes"}, "policy": {"strategy": strategy, **policy}}
    assert "set it to" in problems(rlvr_tree, model, **fields)[where]
    plain = {"runtime": {"kind": "processes"}, "policy": {"strategy": {"kind": "fsdp2", "num_ranks": 2}}}
    assert not problems(rlvr_tree, model, **plain)


def test_one_that_no_config_could_tell_of_is_refused_when_it_is_opened(model):
    with pytest.raises(ModelError, match="is of family qwen3_vl, which sees: take engine"):
        HFWeightAssembler(model, lora=None)
    config = PolicyConfig(model=model, strategy=Fsdp2StrategyConfig(sp=2))
    with pytest.raises(ModelError, match=r"models of family qwen3_vl see \(set it to 1\)"):
        skeleton(config, load_tokenizer(model), head="language")


def test_a_check_opens_a_model_that_sees_as_what_it_is_and_misses_what_its_files_lack(model, tmp_path):
    _open_model(model, speaks=True, lora=None)
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    lost = next(name for name in weights if "visual" in name)
    save_file(
        {name: tensor for name, tensor in weights.items() if name != lost}, broken / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ModelError, match=f"lacks weights of the model it describes: .*{lost.split('.')[-1]}"):
        _open_model(str(broken), speaks=True, lora=None)


def test_a_prompt_with_a_picture_cannot_reach_an_engine_of_a_model_that_reads_text(tmp_path):
    renderer = Renderer(load_tokenizer(str(make_tiny(tmp_path))))
    with pytest.raises(ModelError, match="it reads text only"):
        renderer.start([message("user", picture(0))])


def test_the_families_that_are_told_by_name_are_those_that_can_be_opened(model, tiny_model):
    assert set(SEEING) == set(FAMILIES)
    assert [seeing_family(name) for name in (model, str(tiny_model), "no/such-model", None)] == ["qwen3_vl", None, None, None]
