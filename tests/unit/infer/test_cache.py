import torch

from reroll.infer.embedded.attention import SlotCache

KV_HEADS, DIM = 2, 8


def make_cache():
    return SlotCache(num_layers=2, num_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, device=torch.device("cpu"))


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


def test_what_was_taken_out_can_be_put_into_another_slot_in_part():
    cache = make_cache()
    cache.reserve(num_slots=2, length=10)
    cache.values(1)[0] = torch.randn(cache.values(1)[0].shape)
    kept, before = cache.save_prefix(0, length=8), cache.values(1)[0].clone()
    cache.values(1)[0].zero_()
    cache.restore_prefix(1, kept, length=5)
    assert torch.equal(cache.values(1)[1, :, :5], before[:, :5])
    assert not cache.values(1)[1, :, 5:].any()
    assert kept.nbytes == 8 * cache.bytes_per_token
