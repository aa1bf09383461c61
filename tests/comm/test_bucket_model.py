"""The bucket model against steps that can be counted by hand, and against limits that hold for any buckets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.comm.alpha_beta import AlphaBeta
from refimpl.comm.bucket_model import Step, play


def test_by_hand() -> None:
    link = AlphaBeta(2.0, 0.5)  # 8 bytes take 6 s
    assert play([], 7.0, link).seconds == 7.0
    one = play([(10.0, 8.0)], 10.0, link)
    assert (one.seconds, one.exposed) == (10 + link.seconds(8.0), link.seconds(8.0))
    # Hidden: from 1 to 7.
    assert play([(1.0, 8.0)], 10.0, link).seconds == 10.0
    # Two: from 1 to 7, and, though it is full at 5, from 7 to 13.
    assert play([(1.0, 8.0), (5.0, 8.0)], 10.0, link).seconds == 13.0
    # One at a time: the second launch waits until 7 for the first, so backward's last 5 s end at 12, the second at 13.
    assert play([(1.0, 8.0), (5.0, 8.0)], 10.0, link, in_flight=1).seconds == 13.0
    assert play([(1.0, 8.0), (5.0, 0.0)], 10.0, link, in_flight=1) == Step(12.0, 2.0)


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
