"""The race of compressed gradients runs: what it finds depends on the machine."""

from refimpl.bench.compress_peers import PAIRS, measure
from refimpl.bench.race import Turns
from refimpl.bench.zero import Workload


def test_every_pair_is_raced() -> None:
    found = measure(2, Workload(parameters=50_000, context=8, turns=Turns(1, 1, 2)), rank=1)
    assert found.keys() == set(PAIRS)
    assert all(min(values) > 0 for values in found.values())
