import gc

from hypothesis import given
from hypothesis import strategies as st

from reroll_zoo.paged_cache.backend import PagePool, SavedPages


def grown(num_pages):
    pool = PagePool()
    pool.grow(num_pages)
    return pool


def test_page_zero_is_never_given_out():
    pool = grown(5)
    assert sorted(pool.take() for _ in range(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_shared_page_is_free_when_its_last_holder_gives_it_back():
    pool = grown(3)
    page = pool.take()
    pool.share([page])
    pool.give_back([page])
    assert pool.num_free == 1
    pool.give_back([page])
    assert pool.num_free == 2


def test_growing_keeps_what_is_used():
    pool = grown(3)
    used = {pool.take(), pool.take()}
    pool.grow(6)
    assert not used & {pool.take() for _ in range(3)}


def test_kept_pages_are_held_as_long_as_someone_holds_them():
    pool = grown(4)
    pages = [pool.take(), pool.take()]
    kept = SavedPages(pool, pages)
    pool.give_back(pages)
    assert pool.num_free == 1
    del kept
    gc.collect()
    assert pool.num_free == 3


@given(st.lists(st.sampled_from(["take", "share", "drop"]), max_size=60))
def test_no_page_is_lost_or_given_out_twice(actions):
    pool, held = grown(8), []
    for action in actions:
        if action == "take" and pool.num_free:
            page = pool.take()
            assert page not in held
            held.append(page)
        elif action == "share" and held:
            pool.share([held[0]])
            held.append(held[0])
        elif action == "drop" and held:
            pool.give_back([held.pop()])
        assert pool.num_free == 7 - len(set(held))
