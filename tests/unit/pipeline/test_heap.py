"""The garbage collector passes over what was there before a run, and finds what the run leaves."""

import gc
import weakref

import pytest

from reroll.pipeline.run import gc_frozen


class Knot:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("fails", [False, True])
def test_old_objects_are_passed_over_while_it_is_open_and_new_garbage_is_found(fails: bool) -> None:
    old = Knot()
    is_there = weakref.ref(old)
    try:
        with gc_frozen():
            del old
            gc.collect()
            assert is_there() is not None
            new = weakref.ref(Knot())
            gc.collect()
            assert new() is None
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert is_there() is None
