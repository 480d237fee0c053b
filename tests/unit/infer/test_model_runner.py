import pytest
import torch

from reroll.infer.embedded.model_runner import ModelRunner
from reroll.infer.sequence import completes_stop
from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model
from reroll_zoo.packed_linears import packing_available
from reroll_zoo.tiny_models import make_tiny, tiny_tokenizer

IDS, POSITIONS, BOUNDS = torch.tensor([5, 9, 30, 7, 8]), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 3, 5])


def load(folder, dtype=torch.float32):
    return load_model(str(folder), dtype=dtype, device="cpu")


def run(runner):
    with torch.inference_mode():
        return runner.logits(runner.hidden(IDS, POSITIONS, PackedAttention(BOUNDS)))


def run_plain(model):
    with torch.inference_mode():
        return logits(model, hidden_states(model, IDS, POSITIONS, PackedAttention(BOUNDS)))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_equal_dtype_and_device_are_adopted_not_copied(tmp_path, tied):
    folder = make_tiny(tmp_path, tie_embeddings=tied)
    trainer, runner = load(folder), ModelRunner(load(folder))
    runner.load(dict(trainer.named_parameters()))
    ours = dict(runner.model.named_parameters())
    for name, parameter in trainer.named_parameters():
        assert ours[name].data_ptr() == parameter.data_ptr(), name
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.1)
    torch.testing.assert_close(run(runner), run_plain(trainer), atol=1e-5, rtol=1e-5)


def test_adoption_leaves_the_trainer_able_to_differentiate(tmp_path):
    folder = make_tiny(tmp_path)
    trainer, runner = load(folder), ModelRunner(load(folder))
    runner.load(dict(trainer.named_parameters()))
    run(runner)
    run_trainer = logits(trainer, hidden_states(trainer, IDS, POSITIONS, PackedAttention(BOUNDS)))
    run_trainer.sum().backward()
    assert all(parameter.grad is not None for parameter in trainer.parameters())


def test_a_tied_head_may_also_be_given_by_its_own_name(tmp_path):
    folder = make_tiny(tmp_path)
    trainer, runner = load(folder), ModelRunner(load(folder))
    runner.load(trainer.state_dict())
    assert "lm_head.weight" in trainer.state_dict()
    torch.testing.assert_close(run(runner), run_plain(trainer))


def test_weights_of_another_dtype_are_cast(tmp_path):
    folder = make_tiny(tmp_path, seed=1)
    runner = ModelRunner(load(make_tiny(tmp_path / "other", seed=2), torch.bfloat16))
    runner.load(dict(load(folder).named_parameters()))
    torch.testing.assert_close(run(runner).float(), run_plain(load(folder, torch.bfloat16)).float(), atol=0.02, rtol=0.05)


@pytest.mark.skipif(not packing_available(torch.device("cpu"), torch.bfloat16), reason="no oneDNN bf16 on this machine")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_packed_layers_compute_what_the_plain_ones_do(tmp_path, family):
    folder = make_tiny(tmp_path, family=family, initializer_range=0.1)
    runner, plain = ModelRunner(load(folder, torch.bfloat16)), load(folder, torch.bfloat16)
    assert runner._packed
    torch.testing.assert_close(run(runner).float(), run_plain(plain).float(), atol=0.05, rtol=0.05)


def test_stop_strings_are_found_across_tokens():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("ab</answer>").input_ids
    assert completes_stop(tokenizer, ids, ("</answer>",))
    assert not completes_stop(tokenizer, ids[:-1], ("</answer>",))
    assert not completes_stop(tokenizer, ids, ())


def test_a_stop_string_counts_only_at_the_token_that_completes_it():
    tokenizer = tiny_tokenizer()
    assert not completes_stop(tokenizer, tokenizer("xENDy").input_ids, ("END",))
    assert completes_stop(tokenizer, tokenizer("xENDyEND").input_ids, ("END",))


def test_a_part_without_weights_changes_nothing(tmp_path):
    runner = ModelRunner(load(make_tiny(tmp_path)))
    before = run(runner)
    runner.load_part({})
    runner.load(dict(load(tmp_path).named_parameters()))
    assert torch.equal(run(runner), before)
