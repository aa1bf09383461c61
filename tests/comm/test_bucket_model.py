"""The bucket model against steps that can be counted by hand, and against limits that hold for any buckets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.comm.alpha_beta import AlphaBeta
from refimpl.comm.bucket_model import Step, play


def test_by_hand() -> None:
    link = AlphaBeta(2.0, 0.5)  # a half of n bytes: 1 s, and n / 4 s of the link
    assert play([], 7.0, link).seconds == 7.0
    one = play([(10.0, 8.0)], 10.0, link)
    assert (one.seconds, one.exposed) == (10 + link.seconds(8.0), link.seconds(8.0))
    # Hidden: full at 1, the halves arrive at 4 and at 7.
    assert play([(1.0, 8.0)], 10.0, link) == Step(10.0, 0.0)
    # Two: the second's first half is on the link from 6 to 8, behind the first one's second (4 to 6); it arrives at 9.
    assert play([(1.0, 8.0), (5.0, 8.0)], 10.0, link).seconds == 12.0
    # At once: first halves 0 to 2 and 2 to 4, there at 3 and 5; second ones 4 to 6 and 6 to 8, the last there at 9.
    assert play([(0.0, 8.0), (0.0, 8.0)], 0.0, link).seconds == 9.0
    # One at a time: the second launch waits until 6 for the first, so all that is computed after 5 comes 1 s later.
    assert play([(0.0, 8.0), (5.0, 0.0)], 10.0, link, in_flight=1) == Step(11.0, 1.0)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(1, 100)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(1e-3, 0.1),
    st.integers(1, 4),
)
def test_no_step_beats_its_link_or_its_computing(
    buckets: list[tuple[float, float]], alpha: float, beta: float, in_flight: int
) -> None:
    link, total = AlphaBeta(alpha, beta), sum(size for _, size in buckets)
    buckets = sorted(buckets)
    found = play(buckets, 1.0, link, in_flight)
    assert found.exposed == pytest.approx(found.seconds - 1.0)
    assert found.seconds >= max(1.0, buckets[0][0] + total * beta) - 1e-9
    one_after_another = 1.0 + sum(link.seconds(size) for _, size in buckets)
    assert found.seconds <= one_after_another + 1e-9
    slower = play(buckets, 1.0, AlphaBeta(alpha, 2 * beta), in_flight)
    assert slower.seconds >= found.seconds - 1e-9


def test_a_bucket_is_full_before_backward_is_over() -> None:
    with pytest.raises(ValueError, match=r"a bucket is full after 3.0 s, backward over after 2.0"):
        play([(3.0, 1.0)], 2.0, AlphaBeta(1.0, 1.0))
