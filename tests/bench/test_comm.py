"""All ways to do a collective give the same result, and the rows are consistent."""

import pytest
import torch
import worlds
from torch import Tensor

from refimpl.bench.comm import COLLECTIVES, NATIVE, contestants, measure, numbers, transports
from refimpl.bench.race import Turns


def results(collective: str) -> dict[str, list[Tensor]]:
    """Contestant -> its buffers after one call on this rank's own contents (integers: sums are exact in any order)."""
    groups = transports()
    group = next(iter(groups.values()))
    shard = torch.arange(5.0) + 100 * group.rank
    full = torch.arange(5.0 * group.size) * (group.rank + 1)
    found = {}
    for name in contestants(collective, groups, full, full, shard):
        buffers = [full.clone(), torch.zeros_like(full), shard.clone()]
        contestants(collective, groups, *buffers)[name]()
        found[name] = buffers
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_contestants_do_the_same(collective: str, ranks: int) -> None:
    for rank in worlds.run(results, collective, ranks=ranks):
        expected = rank.pop(NATIVE)
        assert rank
        for buffers in rank.values():
            # The full buffer is scratch for some reductions; what counts is the result.
            result = {"all_reduce": 0, "reduce_scatter": 2, "all_gather": 0, "all_to_all": 1}[collective]
            assert torch.equal(buffers[result], expected[result])


def test_rows_of_a_run() -> None:
    heats = list(measure([2], [1000], turns=Turns(turns=1, steps=2)))
    assert [rows[0].collective for rows in heats] == list(COLLECTIVES)
    assert [row.implementation for row in heats[0] if row.pages == "plain"] == [
        *(["refimpl shared", "refimpl gloo"] if worlds.NEAR == "shared" else ["refimpl"]),
        "refimpl ring",
        NATIVE,
    ]
    for rows in heats:
        native = {row.pages: row.ms for row in rows if row.implementation == NATIVE}
        assert native.keys() == {"plain", "huge"}
        for row in rows:
            assert (row.ranks, row.bytes) == (2, 1000)
            assert row.ratio_same_pages == pytest.approx(row.ms / native[row.pages])
            assert row.ratio_any_pages == pytest.approx(row.ms / min(native.values()))


def test_buffers_divide_among_the_ranks() -> None:
    assert numbers(1000, 3) == 249
    assert numbers(1, 4) == 4
