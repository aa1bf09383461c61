"""What a bucket's size costs: the time of a step in which gradients travel in buckets while backward goes on.

An all-reduce of n bytes takes alpha + n beta, half of it in each of two halves, of which the second begins when the
first has arrived; one message at a time is on the link.

    small buckets    many alphas, which nothing hides once the link is never idle
    large buckets    the first leaves late, and the last one's time, alpha + n beta, is all exposed

Between them lies the best. The model is played, not solved: a bucket is launched when its last gradient is there, the
host then waits for what must come before (all but `in_flight` of the buckets), and that moves all later gradients, as
in `refimpl.zero.gradients`.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from refimpl.comm.alpha_beta import AlphaBeta


@dataclass(frozen=True)
class Step:
    """Seconds from where computing begins to the last bucket's sum, and those of them in which nothing is computed."""

    seconds: float
    exposed: float


def play(buckets: Sequence[tuple[float, float]], computing: float, link: AlphaBeta, in_flight: int = 2) -> Step:
    """`buckets`: (seconds of computing until its last gradient is there, bytes), in the order of the launches.

    `computing`: seconds until backward is over. `link`: of a whole all-reduce. ValueError if a bucket is full after it.
    """
    if any(full > computing for full, _ in buckets):
        raise ValueError(
            f"play: a bucket is full after {max(f for f, _ in buckets)} s, backward over after {computing}"
        )
    clock = computed = free = 0.0  # free: when the link is
    halves: deque[tuple[float, float]] = deque()  # of those that wait for their second half: from when on, bytes
    over: deque[float] = deque()  # when each bucket's sum is there, as far as that is known

    def half(since: float, size: float) -> float:
        """Put half an all-reduce on the link; when it arrives."""
        nonlocal free
        free = max(since, free) + size * link.beta / 2
        return free + link.alpha / 2

    def go_on(until: float) -> None:
        """The second halves that begin by then."""
        while halves and halves[0][0] <= until:
            over.append(half(*halves.popleft()))

    for full, size in buckets:
        full = max(full, computed)  # buckets are launched in one order
        clock, computed = clock + full - computed, full
        while len(halves) + len(over) >= in_flight:
            go_on(halves[0][0] if not over else clock)
            clock = max(clock, over.popleft())
        go_on(clock)
        halves.append((half(clock, size), size))
    clock += computing - computed
    go_on(math.inf)
    clock = max([clock, *over])
    return Step(clock, clock - computing)
