import pytest
import torch

from reroll.infer.embedded import attention
from reroll.infer.embedded.attention import SlotCache, StepAttention
from reroll.models.attention import PackedAttention, Scoring

HEADS, KV_HEADS, DIM = 4, 2, 8


def make_cache(*, num_slots, length, dtype=torch.float32):
    cache = SlotCache(num_layers=2, num_heads=KV_HEADS, head_dim=DIM, dtype=dtype, device=torch.device("cpu"))
    cache.reserve(num_slots=num_slots, length=length)
    return cache


def random_qkv(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def whole(tensors, **options):
    length = len(tensors[0])
    return PackedAttention(torch.tensor([0, length])).attend(0, *tensors, scoring=Scoring(scaling=0.3, **options))


def advance(cache, streams, starts, ends, **options):
    """One step that reads tokens starts[i]..ends[i] of stream i in slot i; what each looked at, by stream."""
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    spans = list(zip(streams, starts, ends, strict=True))
    packed = [torch.cat([stream[part][start:end] for stream, start, end in spans]) for part in range(3)]
    step = StepAttention(cache, starts=starts, lengths=lengths)
    return step.attend(0, *packed, scoring=Scoring(scaling=0.3, **options)).split(lengths)


def assert_each_is_part_of_the_whole(got, streams, starts, ends, **options):
    for output, stream, start, end in zip(got, streams, starts, ends, strict=True):
        torch.testing.assert_close(output, whole(stream, **options)[start:end])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 7}, {"softcap": 2.0}, {"sliding_window": 7, "softcap": 2.0}])
def test_any_mix_of_reading_continuing_and_writing_equals_one_pass_over_everything(options):
    streams = [random_qkv(length, seed) for seed, length in enumerate((90, 90, 70, 20, 66, 130, 10))]
    cache = make_cache(num_slots=len(streams), length=130)
    starts = [0] * len(streams)
    for ends in (
        [5, 40, 60, 1, 3, 2, 2],  # All read a context; one of a single token.
        [6, 41, 61, 4, 5, 66, 8],  # Three write a token; the others go on with 3, 2, 64 and 6.
        [80, 45, 62, 19, 65, 67, 9],
        [90, 90, 70, 20, 66, 130, 10],
    ):
        got = advance(cache, streams, starts, ends, **options)
        assert_each_is_part_of_the_whole(got, streams, starts, ends, **options)
        starts = ends


def test_bf16_tokens_that_are_written_or_drafted_see_what_one_pass_sees_in_a_cache_longer_than_they_need():
    streams = [[part.bfloat16() for part in random_qkv(length, seed)] for seed, length in enumerate((60, 50, 40))]
    cache = make_cache(num_slots=3, length=200, dtype=torch.bfloat16)
    advance(cache, streams, [0, 0, 0], [50, 40, 30])
    starts = [50, 40, 30]
    for ends in ([51, 41, 31], [52, 44, 39], [60, 50, 40]):  # One token each; up to nine; ten: another kernel.
        got = advance(cache, streams, starts, ends)
        for output, stream, start, end in zip(got, streams, starts, ends, strict=True):
            exact = whole([part.float() for part in stream])[start:end]
            torch.testing.assert_close(output.float(), exact, rtol=0.02, atol=0.02)
        starts = ends


def test_a_window_changes_what_a_continuing_token_sees():
    stream, cache = random_qkv(101, 3), make_cache(num_slots=1, length=101)
    advance(cache, [stream], [0], [90], sliding_window=7)
    [got] = advance(cache, [stream], [90], [101], sliding_window=7)
    assert not torch.allclose(got, whole(stream)[90:])


def test_masks_that_would_be_too_large_are_made_in_pieces(monkeypatch):
    monkeypatch.setattr(attention, "_MAX_SCORES", 5 * 2 * 2 * 128)
    streams, cache = [random_qkv(100, seed) for seed in (4, 5)], make_cache(num_slots=2, length=100)
    advance(cache, streams, [0, 0], [40, 50])
    got = advance(cache, streams, [40, 50], [100, 100])
    assert_each_is_part_of_the_whole(got, streams, [40, 50], [100, 100])


def test_a_copied_slot_continues_like_the_original():
    stream, cache = random_qkv(12, 6), make_cache(num_slots=2, length=12)
    advance(cache, [stream], [0], [11])
    cache.copy(0, 1, length=11)
    got = advance(cache, [stream, stream], [11, 11], [12, 12])
    assert_each_is_part_of_the_whole(got, [stream, stream], [11, 11], [12, 12])
