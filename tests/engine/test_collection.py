import gc
import weakref

import pytest

from viva.threads import frozen_gc


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


def test_what_exists_is_passed_over_until_the_end_and_new_garbage_is_found() -> None:
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    old = Ring()
    gone = weakref.ref(old)
    with frozen_gc():
        assert gc.get_freeze_count() > before
        young, middle, old = gc.get_threshold()
        assert (young > thresholds[0], middle, old > thresholds[2]) == (True, thresholds[1], True)
        del old
        gc.collect()
        assert gone() is not None  # it was there before
        young = weakref.ref(Ring())
        gc.collect()
        assert young() is None
    gc.collect()
    assert gone() is None
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("mine", [(0, 10, 200), (50_000, 5, 100)])
def test_what_others_chose_stays(mine: tuple[int, int, int]) -> None:
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(*mine)
        with frozen_gc():
            assert gc.get_threshold() == mine
        assert gc.get_threshold() == mine
    finally:
        gc.set_threshold(*thresholds)
