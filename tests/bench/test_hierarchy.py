"""The bench of two levels: every way gives the sum, and the rows are consistent with each other and with the model."""

import os

import pytest
import torch

from refimpl.bench.hierarchy import RING, contestants, measure, rows
from refimpl.bench.race import Turns
from refimpl.comm.alpha_beta import AlphaBeta
from refimpl.comm.axes import neighbours
from refimpl.comm.group import Group
from refimpl.comm.level_model import Levels
from refimpl.comm.nodes import RANKS_PER_NODE
from refimpl.launch import run
from refimpl.ranks.environment import variables

LEVELS = Levels(2, 2, AlphaBeta(1e-6, 1e-10), AlphaBeta(1e-4, 8e-9), crowd=2.0)


def results() -> dict[str, bool]:
    group = Group.world()
    near, far = neighbours(group, 2)
    found = {}
    x = torch.empty(10)
    for name, way in contestants(group, near, far, LEVELS, x).items():
        x.copy_(torch.arange(10.0) * (group.rank + 1))
        way()
        found[str(name)] = torch.equal(x, torch.arange(10.0) * 10)
    return found


def test_every_way_gives_the_sum_and_a_run_has_a_row_of_each(capfd: pytest.CaptureFixture[str]) -> None:
    ways = run(results, ranks=4, device="cpu")[0]
    assert len(ways) == 7
    assert all(ways.values())
    before = os.environ.get(RANKS_PER_NODE)
    [heat] = measure([2], 2, [1000], "1Gbit/s 1ns", Turns(turns=1, steps=1, warm_up=0))
    assert "more than the link's 0.001 us: this machine plays no shorter latency" in capfd.readouterr().out
    assert os.environ.get(RANKS_PER_NODE) == before
    assert [row.way for row in heat] == list(ways)
    first = next(row for row in heat if row.way == str(RING))
    for row in heat:
        assert (row.nodes, row.ranks, row.link) == (2, 4, "1Gbit/s 1ns")
        assert row.bytes == 992, "of fp32 that four ranks share evenly"
        assert row.gain == pytest.approx(first.ms / row.ms)
        assert row.predicted_gain == pytest.approx(first.predicted_ms / row.predicted_ms)


def test_the_predicted_gain_is_the_formulas() -> None:
    found = {
        row.way: row
        for row in rows(LEVELS, {"flat ring": [0.003, 0.001, 0.002], "two-level ring": [0.001]}, 10**9, "-")
    }
    assert found["two-level ring"].gain == 1.0  # by the least calls, which nobody disturbed
    assert found["two-level ring"].predicted_gain == pytest.approx(1.5, rel=0.05)


def test_a_link_that_is_none_is_refused_and_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is no link"):
        next(measure([2], 2, [1000], "fast"))
    with pytest.raises(ValueError, match="3 nodes of 200 ranks are 600 processes: at most 512"):
        next(measure([2, 3], 200, [1000], "1Gbit/s"))
    monkeypatch.setenv(RANKS_PER_NODE, "7")
    with variables({RANKS_PER_NODE: "3"}):
        assert os.environ[RANKS_PER_NODE] == "3"
    assert os.environ[RANKS_PER_NODE] == "7"
