"""The formulas for any layout and any number of ranks, drawn by hypothesis; tests/zero counts what they say."""

from hypothesis import given
from hypothesis import strategies as st

from refimpl.plan.formulas import STRATEGIES, Layout, by_collective, memory_bytes, traffic
from refimpl.zero.flat import ALIGN, round_up

RANKS = st.integers(1, 2000)
ITEMSIZE = st.sampled_from([2, 4])
NUMELS = st.lists(st.integers(1, 10**9), min_size=1, max_size=8)


def layout(numels: list[int], ranks: int) -> Layout:
    """Buckets of these sizes, of one parameter each."""
    padded = sum(round_up(n, ranks * ALIGN) for n in numels)
    return Layout(sum(numels), padded - sum(numels), len(numels), len(numels))


@given(NUMELS, RANKS, ITEMSIZE)
def test_each_stage_keeps_no_more_than_the_one_before(numels: list[int], ranks: int, itemsize: int) -> None:
    totals = [sum(memory_bytes(s, ranks, itemsize, layout(numels, ranks)).values()) for s in STRATEGIES]
    assert totals == sorted(totals, reverse=True)
    assert ranks > 1 or len(set(totals)) == 1


@given(NUMELS, RANKS, ITEMSIZE)
def test_what_is_sharded_adds_up_over_the_ranks_to_what_ddp_keeps(numels: list[int], ranks: int, itemsize: int) -> None:
    laid_out = layout(numels, ranks)
    whole, steps = memory_bytes("ddp", ranks, itemsize, laid_out), 4 * laid_out.buckets
    for number, strategy in enumerate(STRATEGIES):
        mine = memory_bytes(strategy, ranks, itemsize, laid_out)
        sharded = {1: {"optimizer", "master weights"}, 2: {"gradients"}, 3: {"parameters"}}
        shards = set().union(*(names for stage, names in sharded.items() if stage <= number))
        for name, kept in mine.items():
            common = steps if name == "optimizer" else 0  # the count of steps is everybody's
            assert (kept - common) * (ranks if name in shards else 1) == whole[name] - common


@given(NUMELS, RANKS, ITEMSIZE, st.integers(1, 16))
def test_traffic_in_units_of_the_parameters(numels: list[int], ranks: int, itemsize: int, micro: int) -> None:
    """2, 2, A + 1 and 3 A times (N-1)/N of the padded bytes; a rank alone sends nothing."""
    laid_out = layout(numels, ranks)
    times = {"ddp": 2, "zero1": 2, "zero2": micro + 1, "zero3": 3 * micro}
    for strategy in STRATEGIES:
        rows = traffic(strategy, ranks, itemsize, laid_out, micro)
        sent = sum(row.bytes for row in rows if row.tag in ("gradients", "parameters"))
        assert sent * ranks == times[strategy] * laid_out.padded * itemsize * (ranks - 1)
        assert sum(by_collective(rows).values()) == sum(row.bytes for row in rows)
        assert all(row.bytes >= 0 for row in rows)
        assert ranks > 1 or not any(row.bytes for row in rows)
