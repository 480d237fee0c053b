import pytest
import torch
from safetensors.torch import load_file

from reroll.config.parts import LoraConfig
from reroll.models.load import load_model
from reroll_zoo.external_engine.weights import HFWeightAssembler
from reroll_zoo.tiny_models import make_tiny

peft = pytest.importorskip("peft")
LORA = LoraConfig(rank=4, alpha=8, targets=["q_proj", "down_proj"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32))


def load(folder, lora=None):
    return load_model(folder, dtype=torch.float32, device="cpu", lora=lora)


def trained(folder):
    """A policy whose adapter has learned something."""
    model = load(folder, LORA)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def adapter_of(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def merged_by_peft(folder):
    model = trained(folder)
    return {
        name.replace(".base_layer", ""): module.get_delta_weight("default") + module.base_layer.weight
        for name, module in ((f"{name}.weight", module) for name, module in model.named_modules())
        if hasattr(module, "get_delta_weight")
    }


def test_whole_weights_pass_as_they_are(folder):
    given = dict(load(folder).named_parameters())
    whole = HFWeightAssembler(folder, lora=None).complete(given)
    assert set(whole) == set(given)
    assert all(whole[name].data_ptr() == given[name].data_ptr() for name in given)
    assert not any(tensor.requires_grad for tensor in whole.values())


@pytest.mark.parametrize("hands_over_base", [True, False])
def test_an_adapter_is_merged_as_peft_merges_it(folder, hands_over_base):
    policy = trained(folder)
    whole = HFWeightAssembler(folder, lora=LORA).complete(
        dict(policy.named_parameters()) if hands_over_base else adapter_of(policy)
    )
    base, merged = dict(load(folder).named_parameters()), merged_by_peft(folder)
    assert set(whole) == set(base)
    assert len(merged) == 4
    for name in base:
        torch.testing.assert_close(whole[name], merged.get(name, base[name]).detach(), atol=1e-6, rtol=0)


def test_a_second_push_merges_into_the_base_and_not_into_the_first(folder):
    weights, policy = HFWeightAssembler(folder, lora=LORA), trained(folder)
    first = weights.complete(dict(policy.named_parameters()))
    second = weights.complete(adapter_of(policy))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_base_in_the_trainers_process_is_held_once(folder):
    policy = trained(folder)
    whole = HFWeightAssembler(folder, lora=LORA).complete(dict(policy.named_parameters()))
    assert whole["model.embed_tokens.weight"].data_ptr() == policy.get_input_embeddings().weight.data_ptr()


def test_stacked_experts_get_the_names_of_the_folder(tmp_path):
    folder = make_tiny(tmp_path, family="qwen3_moe", hidden=32)
    whole = HFWeightAssembler(str(folder), lora=None).complete(dict(load(str(folder)).named_parameters()))
    stored = load_file(folder / "model.safetensors")
    assert whole.keys() == stored.keys()
    assert all(torch.equal(whole[name], stored[name]) for name in stored)


def test_parts_pass_as_they_come_and_the_rest_completes_them(folder):
    given, weights = dict(load(folder).named_parameters()), HFWeightAssembler(folder, lora=None)
    names = list(given)
    assert weights.come_in_parts
    for some in (names[:2], names[2:5]):
        part = weights.part({name: given[name] for name in some})
        assert {name: tensor.data_ptr() for name, tensor in part.items()} == {name: given[name].data_ptr() for name in some}
    assert set(weights.complete({name: given[name] for name in names[5:]})) == set(names[5:])
    with pytest.raises(ValueError, match="missing"):  # What came in parts counts once.
        weights.complete({name: given[name] for name in names[5:]})


def test_parts_that_are_all_there_is_need_no_rest(folder):
    weights = HFWeightAssembler(folder, lora=None)
    weights.part(dict(load(folder).named_parameters()))
    assert weights.complete({}) == {}


def test_parts_that_leave_one_out_or_do_not_fit_are_refused(folder):
    given, weights = dict(load(folder).named_parameters()), HFWeightAssembler(folder, lora=None)
    first, *others = given
    weights.part({name: given[name] for name in others})
    with pytest.raises(ValueError, match=f"missing .*{first}"):
        weights.complete({})
    with pytest.raises(ValueError, match="unknown"):
        weights.part({"stranger": given[first]})
    with pytest.raises(ValueError, match="shape"):
        weights.part({first: given[first][:1]})
    assert set(weights.complete({first: given[first]})) == {first}


def test_what_is_merged_or_taken_apart_does_not_come_in_parts(folder, tmp_path):
    assert not HFWeightAssembler(folder, lora=LORA).come_in_parts
    assert not HFWeightAssembler(str(make_tiny(tmp_path, family="qwen3_moe", hidden=32)), lora=None).come_in_parts
