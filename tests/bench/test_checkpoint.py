"""The rows of `refimpl bench checkpoint`: what is compared with what. Times themselves are nobody's to assert."""

from pathlib import Path

from refimpl.bench.checkpoint import ASYNCHRONOUS, COPY, SYNCHRONOUS, TORCH, measure, rows
from refimpl.bench.race import Turns
from refimpl.bench.zero import Workload


def test_every_way_is_timed_and_nothing_is_left(tmp_path: Path) -> None:
    (heat,) = measure([2], [100_000], [2], Turns(1, 1), tmp_path)
    assert [row.save for row in heat] == [SYNCHRONOUS, ASYNCHRONOUS, COPY, TORCH]
    assert {(row.stage, row.ranks, row.parameters) for row in heat} == {(2, 2, Workload(100_000).gpt.parameters)}
    assert all(row.written_ms > row.blocked_ms > 0 for row in heat)
    assert not list(tmp_path.iterdir())


def test_blocked_is_told_of_the_synchronous_save() -> None:
    ways = (SYNCHRONOUS, ASYNCHRONOUS, COPY, TORCH)
    times = {name: [10.0 * (i + 1)] * 3 for i, name in enumerate(ways)}
    times |= {f"{name}, written": [5.0, 1.0, 100.0] for name in ways}
    made = rows(times, 1, 4, 7)
    assert [row.blocked_of_synchronous for row in made] == [1, 2, 3, 4]
    assert made[1].written_ms == 25
