"""Adapters in models: what learns, what stays, and what folders hold."""

import importlib.util
import json
import subprocess
import sys

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from reroll.config.load import parse_config
from reroll.config.parts import LoraConfig
from reroll.errors import ConfigError, ModelError
from reroll.infer.embedded.model_runner import ModelRunner
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.heads import score_head
from reroll.models.load import has_adapter, load_model, load_tokenizer, resolve_model, save_model
from reroll.models.logprobs import token_logprobs
from reroll.models.lora import read_adapter
from reroll_zoo.packed_linears import packing_available
from reroll_zoo.tiny_models import make_tiny

IDS, POSITIONS, BOUNDS = torch.tensor([5, 9, 30, 7, 8]), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 3, 5])
LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"), initializer_range=0.1)


def load(folder, dtype=torch.float32, **options):
    return load_model(str(folder), dtype=dtype, device="cpu", **options)


def run(model):
    with torch.no_grad():
        return logits(model, hidden_states(model, IDS, POSITIONS, PackedAttention(BOUNDS)))


def taught(model, seed=1):
    """The model with something in everything that is trained."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def save(model, base, folder):
    save_model(model, load_tokenizer(str(base)), folder)
    return folder


def test_a_fresh_adapter_changes_nothing(folder):
    assert torch.equal(run(load(folder, lora=LORA)), run(load(folder)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapter_is_trained_and_it_has_the_models_dtype(folder, dtype):
    model = load(folder, dtype, lora=LORA)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype == dtype


def test_all_linear_layers_of_the_decoder_are_adapted_and_no_head(folder):
    names = [name.partition(".lora_") for name, _ in load(folder, lora=LORA).named_parameters()]
    adapted = {layer.rpartition(".")[2] for layer, adapter, _ in names if adapter}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_layers_can_be_chosen_by_name(folder):
    model = load(folder, lora=LoraConfig(rank=2, targets=["v_proj", "layers.0.mlp.up_proj"]))
    adapted = {name.split(".lora_")[0] for name, _ in model.named_parameters() if "lora_" in name}
    assert adapted == {"model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj", "model.layers.0.mlp.up_proj"}


@pytest.mark.parametrize("targets", [["q_proj", "w_q"], ["lm_head"], ["embed_tokens"], []])
def test_names_of_other_layers_are_refused(folder, targets):
    with pytest.raises(ModelError, match=r"choose among .*q_proj"):
        load(folder, lora=LoraConfig(targets=targets))


def test_every_worker_starts_from_the_same_adapter_whatever_the_global_seed(folder):
    torch.manual_seed(1)
    first = dict(load(folder, lora=LORA).named_parameters())
    torch.manual_seed(2)
    for name, parameter in load(folder, lora=LORA).named_parameters():
        assert torch.equal(parameter, first[name])
        if "lora_A" in name:  # Uniform with bound 1 / sqrt(inputs), as a fresh linear layer.
            assert 0.5 < parameter.abs().max() * parameter.shape[1] ** 0.5 <= 1


def test_a_saved_adapter_opens_in_peft_and_names_its_base(folder, tmp_path):
    model = taught(load(folder, lora=LORA))
    save(model, folder, tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "config.json").exists()
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS[None, :3]).logits[0], run(model)[:3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_folder_loads_as_its_base_with_the_adapter_merged(folder, tmp_path, dtype):
    model = taught(load(folder, dtype, lora=LORA))
    merged = load(save(model, folder, tmp_path), dtype)
    assert not has_adapter(merged)
    assert all(parameter.requires_grad and parameter.dtype == dtype for parameter in merged.parameters())
    assert [name for name, _ in merged.named_parameters()] == [name for name, _ in load(folder).named_parameters()]
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(run(merged), run(model), atol=tolerance, rtol=tolerance)
    assert not torch.allclose(run(merged), run(load(folder, dtype)), atol=0.2)


def test_an_adapter_can_be_trained_on_top_of_a_merged_one(folder, tmp_path):
    first = save(taught(load(folder, lora=LORA)), folder, tmp_path / "first")
    second = taught(load(first, lora=LORA), seed=2)
    torch.testing.assert_close(run(load(save(second, folder, tmp_path / "second"))), run(second), atol=1e-5, rtol=1e-5)


def test_the_tokenizer_is_the_adapters_own_or_else_its_bases(folder, tmp_path):
    save(load(folder, lora=LORA), folder, tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template
    for file in tmp_path.glob("*token*"):
        file.unlink()
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(str(tmp_path)).chat_template


def test_an_adapter_whose_base_is_gone_says_so(folder, tmp_path):
    save(load(folder, lora=LORA), folder, tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "/no/such/base"}))
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ModelError, match=r"base is missing: there is no folder /no/such/base"):
        load(tmp_path)


@pytest.mark.parametrize("written", [None, LoraConfig(rank=2)])
def test_an_adapter_of_another_shape_is_not_resumed_from(folder, tmp_path, written):
    save(load(folder, lora=written), folder, tmp_path)
    with pytest.raises(ModelError, match="lora settings that wrote it"):
        read_adapter(load(folder, lora=LORA), tmp_path)


@pytest.mark.parametrize("head", ["score", "language+score"])
def test_the_scalar_head_is_trained_and_saved_with_the_adapter(folder, tmp_path, head):
    model = taught(load(folder, lora=LORA, head=head))
    assert "score.weight" in {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    save(model, folder, tmp_path)
    merged = load(tmp_path, head=head)
    assert torch.equal(score_head(merged).weight, score_head(model).weight)
    hidden = [hidden_states(m, IDS, POSITIONS, PackedAttention(BOUNDS)) for m in (merged, model)]
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=1e-5)
    assert torch.equal(read_adapter(model, tmp_path)["score.weight"], score_head(model).weight)


def test_a_saved_reward_model_opens_in_peft_with_its_score(folder, tmp_path):
    model = taught(load(folder, lora=LORA, head="score"))
    save(model, folder, tmp_path)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        said = peft.PeftModel.from_pretrained(base, tmp_path)(IDS[None, :3]).logits[0, 0]
        hidden = hidden_states(model, IDS[:3], POSITIONS[:3], PackedAttention(torch.tensor([0, 3])))
        torch.testing.assert_close(said, score_head(model)(hidden[-1])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("written", "wanted"), [("language", "score"), ("language+score", "language"), ("score", "language")])
def test_an_adapter_learned_under_one_head_serves_a_model_with_another(folder, tmp_path, written, wanted):
    model = taught(load(folder, lora=LORA, head=written))
    merged = load(save(model, folder, tmp_path), head=wanted)
    hidden = [hidden_states(m, IDS, POSITIONS, PackedAttention(BOUNDS)) for m in (merged, model)]
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=1e-5)
    assert wanted == "language" or not score_head(merged).weight.any()


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_frozen_head_gets_no_gradient_and_costs_none(folder, lora, monkeypatch):
    summed = []
    monkeypatch.setattr("reroll.models.logprobs._accumulate", lambda total, part: summed.append(part) or part)
    model = load(folder, lora=lora)
    hidden = torch.randn(5, 64, requires_grad=True)
    token_logprobs(model, hidden, IDS, torch.tensor([1, 2, 4]), temperature=1.0, chunk=2).sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert (model.get_output_embeddings().weight.grad is None) == bool(lora)
    assert len(summed) == (0 if lora else 2), "one product for each chunk of two tokens"


@pytest.mark.skipif(not packing_available(torch.device("cpu"), torch.bfloat16), reason="no oneDNN bf16 on this machine")
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]])
def test_packed_layers_carry_adapters_and_only_what_changed_is_packed_again(folder, targets, monkeypatch):
    lora = LoraConfig(rank=4, targets=targets)
    trainer, runner = taught(load(folder, torch.bfloat16, lora=lora)), ModelRunner(load(folder, torch.bfloat16, lora=lora))
    assert len(runner._packed) == 2 * 4 + 1, "one product for q, k and v, and one for gate and up"
    repacked = []
    monkeypatch.setattr("reroll_zoo.packed_linears.PackedLinear.repack", repacked.append)
    runner.load({name: weight for name, weight in trainer.named_parameters() if weight.requires_grad})
    assert not repacked
    with torch.inference_mode():
        ours = runner.logits(runner.hidden(IDS, POSITIONS, PackedAttention(BOUNDS)))
    torch.testing.assert_close(ours.float(), run(trainer).float(), atol=0.1, rtol=0.1)


def test_peft_is_not_loaded_without_an_adapter():
    check = "import sys, reroll.pipeline.run; assert 'torch' in sys.modules; assert 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_config_with_an_adapter_needs_peft(rlvr_tree, tmp_path, monkeypatch):
    rlvr_tree["policy"]["lora"] = {"rank": 4}
    assert parse_config(rlvr_tree, folder=tmp_path).policy.lora == LoraConfig(rank=4)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(ConfigError, match=r"policy\.lora: needs the package peft .*reroll\[lora\]"):
        parse_config(rlvr_tree, folder=tmp_path)


def test_an_adapter_folder_is_a_model_to_the_config_checks(rlvr_tree, folder, tmp_path):
    rlvr_tree["policy"]["model"] = str(save(load(folder, lora=LORA), folder, tmp_path / "adapter"))
    assert parse_config(rlvr_tree, folder=tmp_path)
    rlvr_tree["policy"]["strategy"] = {"micro_batch_tokens": 4096}
    rlvr_tree["rollout"]["max_tokens"] = 3000
    with pytest.raises(ConfigError, match="exceeds the model's context of 2048") as caught:
        parse_config(rlvr_tree, folder=tmp_path)
    assert {violation.path for violation in caught.value.violations} == {"rollout.max_tokens"}
