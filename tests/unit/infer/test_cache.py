import torch

from reroll.infer.embedded.cache import SlotCache, StepAttention
from reroll.models.attention import PackedAttention

HEADS, KV_HEADS, DIM = 4, 2, 8


def make_cache():
    return SlotCache(num_layers=2, num_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, device=torch.device("cpu"))


def random_qkv(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def whole(tensors, **options):
    length = len(tensors[0])
    return PackedAttention(torch.tensor([0, length])).attend(0, *tensors, scaling=0.3, **options)


def test_growing_keeps_what_was_stored():
    cache = make_cache()
    cache.reserve(num_slots=2, length=10)
    cache.keys(1)[:2, :, :10] = torch.arange(2 * KV_HEADS * 10 * DIM).view(2, KV_HEADS, 10, DIM).float()
    before = cache.keys(1)[:2, :, :10].clone()
    cache.reserve(num_slots=3, length=500)
    assert torch.equal(cache.keys(1)[:2, :, :10], before)
    assert cache.num_slots >= 3
    assert cache.max_length >= 500


def test_growing_is_rare_when_lengths_creep_up():
    cache, sizes = make_cache(), set()
    for length in range(1, 1000):
        cache.reserve(num_slots=1, length=length)
        sizes.add(cache.max_length)
    assert len(sizes) <= 9


def test_freeing_gives_the_memory_back():
    cache = make_cache()
    cache.reserve(num_slots=4, length=100)
    assert cache.num_bytes > 0
    cache.free()
    assert cache.num_bytes == 0


def test_prefill_and_then_decoding_equal_one_pass_over_everything():
    cache, lengths = make_cache(), (5, 70, 1)
    cache.reserve(num_slots=3, length=72)
    streams = [random_qkv(length + 2, seed) for seed, length in enumerate(lengths)]
    packed = [torch.cat([stream[part][:-2] for stream in streams]) for part in range(3)]
    prefill = StepAttention(cache, lengths=[], prefill_slots=[0, 1, 2], prefill_lengths=lengths)
    first = prefill.attend(0, *packed, scaling=0.3).split(list(lengths))
    for stream, got in zip(streams, first, strict=True):
        torch.testing.assert_close(got, whole(stream)[:-2])
    for extra in (0, 1):
        step = StepAttention(cache, lengths=[length + extra for length in lengths])
        newest = [torch.stack([stream[part][extra - 2] for stream in streams]) for part in range(3)]
        got = step.attend(0, *newest, scaling=0.3)
        torch.testing.assert_close(got, torch.stack([whole(stream)[extra - 2] for stream in streams]))


def test_one_step_decodes_running_slots_and_prefills_new_ones():
    cache = make_cache()
    cache.reserve(num_slots=2, length=20)
    old, new = random_qkv(9, 1), random_qkv(6, 2)
    StepAttention(cache, lengths=[], prefill_slots=[0], prefill_lengths=[8]).attend(1, *(part[:8] for part in old), scaling=0.3)
    mixed = [torch.cat([a[8:], b]) for a, b in zip(old, new, strict=True)]
    got = StepAttention(cache, lengths=[8], prefill_slots=[1], prefill_lengths=[6]).attend(1, *mixed, scaling=0.3)
    torch.testing.assert_close(got[0], whole(old)[8])
    torch.testing.assert_close(got[1:], whole(new))


def test_decoding_looks_back_only_as_far_as_the_window():
    cache, stream = make_cache(), random_qkv(101, 3)
    cache.reserve(num_slots=1, length=101)
    options = {"scaling": 0.3, "sliding_window": 7}
    prefill = StepAttention(cache, lengths=[], prefill_slots=[0], prefill_lengths=[100])
    prefill.attend(0, *(part[:100] for part in stream), **options)
    got = StepAttention(cache, lengths=[100]).attend(0, *(part[100:] for part in stream), **options)
    torch.testing.assert_close(got[0], whole(stream, sliding_window=7)[100])
    assert not torch.allclose(got[0], whole(stream)[100])


def test_a_copied_slot_continues_like_the_original():
    cache, stream = make_cache(), random_qkv(12, 4)
    cache.reserve(num_slots=3, length=12)
    StepAttention(cache, lengths=[], prefill_slots=[0], prefill_lengths=[11]).attend(
        0, *(part[:11] for part in stream), scaling=0.3
    )
    cache.copy(0, 1, length=11)
    got = StepAttention(cache, lengths=[11, 11]).attend(0, *(part[11:].repeat(2, 1, 1) for part in stream), scaling=0.3)
    torch.testing.assert_close(got[0], whole(stream)[11])
    torch.testing.assert_close(got[0], got[1])
