"""The README's table: one line a heat, missing peers left empty, and the ratios are those of the report."""

from dataclasses import asdict

import pytest

from refimpl.bench.peers import ALONE
from refimpl.bench.table import COLUMNS, markdown
from refimpl.bench.zero import Workload, rank_rows

TIMES = {
    "plain": {"refimpl Zero1": [20.0], "torch ZeroRedundancy": [25.0], ALONE: [15.0]},
    "huge": {"refimpl Zero1": [18.0], "torch ZeroRedundancy": [20.0], ALONE: [14.0]},
}


def test_lines() -> None:
    rows = [asdict(row) for ranks in (2, 4) for row in rank_rows(TIMES, 1, ranks, Workload())]
    head, rule, two, four = markdown(rows).splitlines()
    assert head.count("|") == rule.count("|") == two.count("|") == len(COLUMNS) + 1
    size = f"{Workload().gpt.parameters / 1e6:.1f}M"
    assert two == f"| Zero1 | 2 | {size} | fp32 | 15 | 20 | 25 |  | 0.80 | 0.90 | 0.90 |"
    assert four == two.replace("| 2 |", "| 4 |", 1)


def test_deepspeed_has_its_column() -> None:
    rows = [asdict(row) for row in rank_rows(TIMES, 1, 2, Workload())]
    slow = [
        dict(row, implementation="DeepSpeed stage 1", step_ms=40.0) for row in rows if "torch" in row["implementation"]
    ]
    line = markdown(rows + slow).splitlines()[-1]
    assert "| 15 | 20 | 25 | 40 |" in line


def test_another_report_is_refused() -> None:
    with pytest.raises(KeyError):
        markdown([{"collective": "all_reduce", "ms": 1.0}])
