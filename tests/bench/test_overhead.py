"""Whose time is counted: refimpl's functions by name, everybody else's together, the profiler's own not at all."""

from itertools import pairwise
from threading import Thread
from typing import Any

import pytest

from refimpl.bench import overhead
from refimpl.bench.overhead import (
    ALL,
    GATHERED,
    HONEST,
    OTHERS,
    PLAIN,
    Cost,
    Lap,
    cpu_us,
    measure,
    profiled,
    rows,
    torchs_heat,
)
from refimpl.measure.ledger import Ledger


def busy() -> None:
    for _ in range(1_000_000):
        pass


def test_our_functions_are_told_from_others() -> None:
    ledger = Ledger()

    def work() -> None:
        for _ in range(3):
            ledger.mark("here")
        busy()

    ours, others = profiled(work)
    assert ours["measure/ledger Ledger.mark"][0] == 3
    assert all(name.startswith("measure/ledger ") for name in ours)
    assert others > sum(us for _, us in ours.values())  # `busy` is not ours


def test_what_is_written_inside_a_function_is_the_function() -> None:
    ledger = Ledger()
    ledger.start("send", 1)
    ours, _ = profiled(lambda: ledger.chrome_trace())
    assert [name for name in ours if "<" in name] == []
    assert ours["measure/ledger Ledger.chrome_trace"][0] == 1


def test_the_profiler_has_a_price() -> None:
    cost = Cost.measured()
    assert cost.called > 0
    assert cost.calling > 0


def test_waiting_is_not_counted() -> None:
    """This thread waits for one that computes: its own CPU time is less than the other's."""
    took: list[float] = []
    other = Thread(target=lambda: took.append(cpu_us(busy)))
    other.start()
    waited = cpu_us(other.join)
    assert waited < took[0]


def test_sums_and_order() -> None:
    laps = [
        Lap({"a": (2.0, 10.0), "b": (1.0, 40.0), "c": (4.0, 2.0)}, others=8.0, staged=150.0, plain=100.0),
        Lap({"a": (2.0, 30.0), "b": (1.0, 40.0)}, others=12.0, staged=170.0, plain=100.0),
    ]
    made = rows(laps, 90.0, 2, "", units=2, top=1)
    found = {row.function: (row.calls, row.us_a_step, row.us_a_parameter) for row in made}
    assert found == {
        "b": (1, 40, 2.0),
        "2 other functions of refimpl": (4, 21, 1.05),
        ALL: (5, 61, 3.05),
        OTHERS: (0, 10, 0.5),
        HONEST: (0, 60, 3.0),
        "torch FSDP2 stage 2 less plain step": (0, 90, 4.5),
        PLAIN: (0, 100, 5.0),
    }
    assert {(row.stage, row.ranks, row.parameters) for row in made} == {(2, 2, 20)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run(stage: int) -> None:
    ((*functions, rest, all_, _, _, peer, plain), *others) = measure([2], [stage], units=3, turns=1, steps=1, top=5)
    assert [functions[0].gathered, *(heat[0].gathered for heat in others)] == (list(GATHERED) if stage == 3 else [""])
    assert len(functions) == 5
    assert all(one.us_a_step >= other.us_a_step for one, other in pairwise(functions))
    assert all_.us_a_step == pytest.approx(sum(row.us_a_step for row in [*functions, rest]), abs=4)
    assert plain.us_a_step > 0
    assert peer.function == overhead.torchs_row(stage)
    assert all(row.parameters == 30 for row in functions)


def test_every_gradient_of_every_unit_is_seen() -> None:
    ((*functions, _, _, _, _, _, _),) = measure([2], [1], units=3, turns=1, steps=2, top=1000)
    calls = {row.function: row.calls for row in functions}
    assert calls["measure/ledger Ledger.mark"] == 30  # one for each gradient that arrives


def test_ranks_compute_on_the_cpu_beside_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to choose, ranks that have a GPU each would speak NCCL, and the models are the host's."""
    asked: list[str] = []

    def run(fn: Any, *args: Any, device: str = "auto", **options: Any) -> list[Any]:
        asked.append(device)
        return [0.0] if fn is torchs_heat else [Lap({"f": (1.0, 1.0)}, 0.0, 0.0, 0.0)]

    monkeypatch.setattr("refimpl.launch.run", run)
    assert len(list(measure([2], [0]))) == 1
    assert asked == ["cpu", "cpu"]
