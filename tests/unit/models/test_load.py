import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from reroll.config.host import models_dir
from reroll.errors import ModelError
from reroll.models.load import load_model, load_tokenizer, resolve_model, save_model, stored_dtype
from reroll_zoo.tiny_models import make_tiny


def test_an_existing_folder_is_itself(tmp_path):
    assert resolve_model(str(make_tiny(tmp_path))) == str(tmp_path)


def test_a_fetched_model_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("REROLL_MODELS", str(tmp_path))
    make_tiny(tmp_path / "little")
    assert resolve_model("little") == str(models_dir() / "little")


def test_another_name_is_taken_as_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.setenv("REROLL_MODELS", str(tmp_path))
    assert resolve_model("someone/some-model") == "someone/some-model"


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder"])
def test_a_missing_folder_is_named(name):
    with pytest.raises(ModelError, match="there is no folder"):
        load_model(name, dtype=torch.float32, device="cpu")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_tokenizer(str(tmp_path))


def test_a_hub_id_that_cannot_be_reached_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="reroll models fetch"):
        load_model("reroll-tests/no-such-model", dtype=torch.float32, device="cpu")


def test_a_model_that_is_not_a_causal_language_model_is_refused(tmp_path):
    AutoConfig.for_model("t5", vocab_size=8, d_model=8, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot load the model"):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")


def test_weights_that_a_broken_download_cut_off_are_named(tmp_path):
    folder = make_tiny(tmp_path / "tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cannot load the model .*tiny"):
        load_model(str(folder), dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match=r"cannot load the model .*tiny"):
        stored_dtype(str(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_model_is_stored_as_is_seen_in_its_files_and_not_in_its_config(tmp_path, dtype):
    folder = make_tiny(tmp_path / "tiny")
    load_model(str(folder), dtype=dtype, device="cpu").save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("bfloat16", "float64").replace("float32", "float64"))
    assert stored_dtype(str(folder)) == dtype


def test_a_model_stored_as_several_types_or_in_another_place_is_of_none(tmp_path):
    folder = make_tiny(tmp_path / "tiny")
    save_file({"extra": torch.zeros(1, dtype=torch.float16)}, folder / "model-00002-of-00002.safetensors")
    assert stored_dtype(str(folder)) is None
    assert stored_dtype("somebody/something") is None


def test_a_loaded_model_is_in_eval_mode_and_in_the_dtype_asked_for(tmp_path):
    model = load_model(str(make_tiny(tmp_path)), dtype=torch.bfloat16, device="cpu")
    assert not model.training
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_opens_with_plain_transformers(tmp_path, tied):
    folder = make_tiny(tmp_path / "a", tie_embeddings=tied)
    model, tokenizer = load_model(str(folder), dtype=torch.float32, device="cpu"), load_tokenizer(str(folder))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    save_model(model, tokenizer, tmp_path / "b")

    assert "reroll" not in json.dumps(json.loads((tmp_path / "b" / "config.json").read_text()))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    assert plain(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    for (name, want), (_, got) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(got, want), name
    shares = plain.get_output_embeddings().weight.data_ptr() == plain.get_input_embeddings().weight.data_ptr()
    assert shares == tied
    assert AutoTokenizer.from_pretrained(tmp_path / "b").chat_template == tokenizer.chat_template
