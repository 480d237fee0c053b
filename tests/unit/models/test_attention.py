import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from reroll.errors import ModelError
from reroll.models.attention import PackedAttention, Scoring, check_supported, hidden_states, logits
from reroll.models.load import load_model
from reroll_zoo.tiny_models import make_tiny

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "smollm3", "mistral", "gemma2"]


def pack(sequences):
    bounds = torch.tensor([0, *(len(sequence) for sequence in sequences)]).cumsum(0)
    return torch.cat(sequences), torch.cat([torch.arange(len(sequence)) for sequence in sequences]), bounds


def random_sequences(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 90, (length,), generator=generator) for length in lengths]


def both_models(folder):
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return load_model(str(folder), dtype=torch.float32, device="cpu"), plain.eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(7,), (5, 5, 6), (3, 60, 1, 9, 17)], ids=["one", "even", "uneven"])
def test_packed_logits_are_those_of_the_plain_model_on_each_sequence_alone(tmp_path, family, lengths):
    ours, plain = both_models(make_tiny(tmp_path, family=family))
    sequences = random_sequences(lengths)
    ids, positions, bounds = pack(sequences)
    with torch.no_grad():
        got = logits(ours, hidden_states(ours, ids, positions, PackedAttention(bounds)))
        want = torch.cat([plain(sequence[None]).logits[0] for sequence in sequences])
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_sliding_window_hides_what_is_too_far_back(tmp_path, family):
    ours, plain = both_models(make_tiny(tmp_path, family=family, sliding_window=4))
    sequences = random_sequences((30, 3, 11))
    ids, positions, bounds = pack(sequences)
    with torch.no_grad():
        got = logits(ours, hidden_states(ours, ids, positions, PackedAttention(bounds)))
        want = torch.cat([plain(sequence[None]).logits[0] for sequence in sequences])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_gradients_through_packing_are_those_of_the_plain_model(tmp_path):
    ours, plain = both_models(make_tiny(tmp_path))
    sequences = random_sequences((3, 40, 1, 9))
    ids, positions, bounds = pack(sequences)
    logits(ours, hidden_states(ours, ids, positions, PackedAttention(bounds))).logsumexp(-1).sum().backward()
    sum(plain(sequence[None]).logits.logsumexp(-1).sum() for sequence in sequences).backward()
    for (name, got), (_, want) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_padding_at_most_doubles_the_tokens():
    lengths = torch.tensor([1000, *[3] * 200, 40, 17])
    attention = PackedAttention(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    assert sum(index.numel() for index in attention._padding[0]) <= 2 * int(lengths.sum())


def test_a_query_in_another_precision_than_the_values_is_cast():
    tokens, heads, dim = 6, 2, 8
    query, key, value = torch.randn(3, tokens, heads, dim)
    attention = PackedAttention(torch.tensor([0, tokens]))
    output = attention.attend(0, query, key, value.bfloat16(), scoring=Scoring(scaling=dim**-0.5))
    assert output.dtype == torch.bfloat16


def test_calling_the_model_directly_says_how_to_run_it(tmp_path):
    model = load_model(str(make_tiny(tmp_path)), dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match="hidden_states"):
        model(torch.tensor([[5, 6]]))


def test_a_family_with_layers_that_are_not_attention_is_refused():
    config = AutoConfig.for_model(
        "minimax", vocab_size=8, hidden_size=16, num_hidden_layers=2, num_local_experts=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=8, num_experts_per_tok=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="minimax"):
        check_supported(model)
