"""How a row is cut, and which launches there are."""

import pytest

from pallas_kernels.norm import NormConfig, default, forward
from pallas_kernels.norm.config import MAX_LENGTH, Segment, padded, padded_length, segments


def test_a_row_is_cut_into_the_widest_accesses_that_its_alignment_allows():
    assert segments(4096, 128, 8) == (Segment(0, 4096, 8, 0, 4096),)
    assert segments(768, 128, 8) == (Segment(0, 512, 4, 0, 512), Segment(512, 256, 2, 0, 256))
    assert segments(1600, 128, 8) == (
        Segment(0, 1024, 8, 0, 1024),
        Segment(1024, 512, 4, 0, 512),
        Segment(1472, 128, 1, 64, 128),  # 64 columns were there before
    )
    assert segments(257, 128, 8) == (Segment(0, 256, 1, 0, 256), Segment(129, 128, 1, 127, 128))
    assert segments(100, 128, 8) == (Segment(0, 128, 1, 0, 100),)


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize("vector", [4, 8])
def test_every_column_is_counted_once_and_every_access_is_aligned(threads, vector):
    for length in [*range(1, 300), 511, 512, 1000, 1599, 4095, 8191, 8192]:
        cut = segments(length, threads, vector)
        counted = [c for s in cut for c in range(s.start + s.first, s.start + s.last)]
        assert counted == list(range(length))
        assert cut[-1].start + cut[-1].width <= padded(length, threads)
        for s in cut:
            assert s.width % (threads * s.vector) == 0 == s.start % s.vector
            assert s.vector == 1 or length % s.vector == 0  # each row starts at a multiple of it


def test_the_default_launch_fits():
    for count in (1, 3, 4, 100, 8192, 100_003):
        for length in (1, 33, 128, 1024, 4096, 8192):
            for itemsize in (2, 4):
                for backward in (False, True):
                    default(count, length, itemsize, 132, backward).check(count, length)
    assert default(8192, 4096, 2, 132) == NormConfig(rows=1, blocks=528)
    assert default(8192, 4096, 2, 132, backward=True) == NormConfig(rows=1, blocks=264)
    assert default(8192, 8192, 2, 132, backward=True) == NormConfig(rows=1, blocks=264, lean=True)
    assert default(8192, 768, 2, 132) == NormConfig(rows=4, blocks=660)


def test_short_rows_are_padded_to_the_threads_that_share_one():
    assert padded_length(8, 3) == 32
    assert padded_length(7, 3) == 128
    assert padded_length(7, 300) == 300


def test_what_is_no_launch_is_refused():
    with pytest.raises(ValueError, match=r"rows=.*expected 1 or 4, found 2"):
        NormConfig(2, 1)
    with pytest.raises(ValueError, match=r"blocks=.*at least 1, found 0"):
        NormConfig(1, 0)
    with pytest.raises(ValueError, match=r"a multiple of it as rows, found 7"):
        NormConfig(4, 1).check(7, 100)
    with pytest.raises(ValueError, match=r"at most one for 4 row"):
        NormConfig(4, 3).check(8, 100)
    with pytest.raises(ValueError, match=rf"rows of at most {MAX_LENGTH} elements, found {MAX_LENGTH + 1}"):
        NormConfig(1, 1).check(1, MAX_LENGTH + 1)


def test_an_unknown_formula_is_refused():
    import jax.numpy as jnp

    with pytest.raises(ValueError, match=r"variance=.*expected one of .*found 'median'"):
        forward(jnp.ones((4, 4)), eps=0.0, variance="median")
