"""The time model against messages really sent, against schedules played tick by tick, and against brute force."""

import math

import pytest
import torch
from worlds import run

from refimpl.comm import ring
from refimpl.comm.group import Group
from refimpl.parallel.pipeline.clock import share
from refimpl.parallel.pipeline.schedules.named import schedule
from refimpl.plan.time import (
    Link,
    adam_seconds,
    bubble,
    checkpoint_interval,
    crossover_bytes,
    exposed_seconds,
    ring_all_reduce_seconds,
    ring_half_seconds,
    tree_all_reduce_seconds,
)

LINK = Link(alpha=3e-6, bandwidth=2e9)


def messages(numel: int) -> tuple[int, int]:
    group = Group.world()
    ring.all_reduce(group, torch.zeros(numel))
    return group.ledger.calls()["send"], group.ledger.sent_bytes()["send"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_takes_the_time_of_the_messages_it_sends(ranks: int) -> None:
    """They go one after the other, so their costs add."""
    for calls, sent in run(messages, 12 * ranks, ranks=ranks):
        seconds = calls * LINK.alpha + sent / LINK.bandwidth
        assert ring_all_reduce_seconds(12 * ranks * 4, ranks, LINK) == pytest.approx(seconds)
    assert ring_half_seconds(1e6, ranks, LINK) * 2 == pytest.approx(ring_all_reduce_seconds(1e6, ranks, LINK))


@pytest.mark.parametrize("ranks", [8, 64, 1000])
def test_ring_and_tree_cross_where_the_formula_says(ranks: int) -> None:
    size = crossover_bytes(ranks, LINK)
    assert ring_all_reduce_seconds(size, ranks, LINK) == pytest.approx(tree_all_reduce_seconds(size, ranks, LINK))
    assert ring_all_reduce_seconds(size / 2, ranks, LINK) > tree_all_reduce_seconds(size / 2, ranks, LINK)
    assert ring_all_reduce_seconds(size * 2, ranks, LINK) < tree_all_reduce_seconds(size * 2, ranks, LINK)


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_the_bubble_is_that_of_a_schedule_played(stages: int, micro_batches: int) -> None:
    assert bubble(stages, micro_batches) == pytest.approx(share(schedule("gpipe", stages, micro_batches)))


def test_communication_is_exposed_when_it_does_not_fit_behind_backward() -> None:
    assert exposed_seconds(10, 2, 1) == pytest.approx(2), "one bucket: nothing overlaps"
    assert exposed_seconds(10, 2, 20) == pytest.approx(2 / 20), "it fits: only the last bucket shows"
    assert exposed_seconds(10, 30, 10) == pytest.approx(30 - 10 * 9 / 10), "bound by the link from the first bucket on"


@pytest.mark.parametrize(("backward", "alpha"), [(0.1, 1e-3), (0.4, 1e-4)])
def test_on_a_slow_link_the_root_of_backward_over_alpha_is_the_best_number_of_buckets(
    backward: float, alpha: float
) -> None:
    exposed = {k: exposed_seconds(backward, k * alpha + 2 * backward, k) for k in range(1, 200)}
    assert min(exposed, key=lambda k: exposed[k]) == round(math.sqrt(backward / alpha))


def test_adam_moves_the_bytes_of_the_tensors_it_reads_and_writes() -> None:
    p = torch.zeros(1000, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([p])
    optimizer.step()
    moments = [t for t in optimizer.state[p].values() if t.numel() > 1]
    moved = sum(t.nbytes for t in [p, p.grad, *moments]) + sum(t.nbytes for t in [p, *moments])
    assert adam_seconds(1000, bandwidth=1) == moved


def test_no_other_interval_loses_less() -> None:
    write, between = 60.0, 20_000.0
    best = checkpoint_interval(write, between)

    def lost(t: float) -> float:
        return write / t + t / (2 * between)

    assert lost(best) == pytest.approx(min(lost(t) for t in range(60, 20_000)), rel=1e-4)
    assert math.isclose(lost(best), math.sqrt(2 * write / between))
