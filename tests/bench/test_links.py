"""What a link delivers stands beside what was asked; two namespaces are two nodes, and the kernel counts."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from refimpl.bench import namespaces
from refimpl.bench.cli import app
from refimpl.bench.links import DIRECT, RING, TWO_LEVEL, Call, Figure, bandwidth, figures, heats, levels
from refimpl.bench.race import Turns, slowest
from refimpl.comm.alpha_beta import AlphaBeta
from refimpl.comm.group import Group
from refimpl.comm.level_model import Choice, predict
from refimpl.comm.link import Link
from refimpl.comm.topology import Topology


@pytest.fixture
def two_namespaces() -> None:
    """Skips where there are none, and says why."""
    if reason := namespaces.unsupported():
        pytest.skip(reason)


def test_rows_of_a_run_on_two_nodes_of_two() -> None:
    found = list(heats([4], [4000], 2, Link(1e9, 1e-3), ["all_reduce", "all_to_all"], Turns(1, 1)))
    delivered, reduced, swapped = found
    assert all(isinstance(row, Figure) for row in delivered)
    assert [(row.figure.split(",")[0], row.asked) for row in delivered] == [
        ("latency", 1000.0),
        ("bandwidth of a pair", 1.0),
        ("bandwidth of a node", 1.0),
        ("a message itself", None),
    ]
    for row in delivered:
        assert (row.link, row.nodes, row.ranks) == ("1 Gbit/s, 1000 us", 2, 4)
        assert isinstance(row, Figure)
        assert row.ratio == (None if row.asked is None else row.delivered / row.asked)
    assert delivered[-1].delivered < delivered[0].delivered
    assert [row.way for row in reduced] == [DIRECT, RING, TWO_LEVEL]
    assert [row.way for row in swapped] == [DIRECT, TWO_LEVEL]
    for row in (*reduced, *swapped):
        assert isinstance(row, Call)
        assert (row.bytes, row.ratio) == (4000, row.ms / row.formula_ms)
    assert reduced[0].ms >= 2 * 1.0  # two halves, each at least as long as the latency


def test_a_latency_below_a_message_itself_is_said_to_be_out_of_reach() -> None:
    found = Topology(2, {(0, 1): AlphaBeta(6e-5, 8e-9)}, 1.0, 1e-10)
    below, above = (figures("", 2, found, 1e9, Link(1e9, latency), 5e-5)[0].figure for latency in (1e-5, 1e-4))
    assert (below, above) == ("latency, us (a message itself takes more)", "latency, us")
    assert len(below) <= 42  # more, and 80 columns cut the table's numbers
    late, near = (figures("", 2, found, 1e9, Link(1e9, latency), 4e-5)[0].figure for latency in (5e-5, 5.5e-5))
    assert (late, near) == ("latency, us (more than 10% late)", "latency, us")


def test_a_nodes_bandwidth_is_what_its_ranks_have_together_whoever_was_first_on_the_cable() -> None:
    """1 byte/us for two ranks, latency 1 ms: the first has its 1,000 bytes after 2 ms, the second after 3.

    Once one comes 0.9 ms late.
    """
    first = {"1000": [2.0, 3.0, 2.0], "2000": [3.0, 5.0, 3.0]}
    second = {"1000": [3.0, 2.0, 2.1], "2000": [5.0, 3.0, 5.0]}
    assert bandwidth(slowest([first, second]), 2) == pytest.approx(8e6)


def test_formulas_have_what_was_asked_between_nodes_and_what_was_found_inside() -> None:
    near, far = AlphaBeta(1e-5, 1e-10), AlphaBeta(2e-3, 3e-8)
    every = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    found = Topology(4, {(a, b): near if a // 2 == b // 2 else far for a, b in every}, 1.5, 1e-10)
    assert (found.by_nodes(2).near, found.by_nodes(2).far) == (near, far)
    real, played = levels(found, 2, None), levels(found, 2, Link(1e9, 1e-3))
    assert (real.near, real.far, real.crowd) == (near, far, 1.5)
    assert (played.near, played.far, played.crowd) == (near, AlphaBeta(1e-3, 8e-9), 2.0)
    # Of n bytes two ranks send half each over the cable that they share, twice; one latency of two is behind these.
    expected = predict("all_reduce", 4e6, played)[Choice(two_level=False, algorithm="exchange")]
    assert expected == pytest.approx(1e-3 + 2 * 2 * 2e6 * 8e-9 + 3e6 * 1e-10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3", "--nodes", "2"], "3 ranks do not make 2 equal nodes"),
        (["--ranks", "6", "--nodes", "3"], "namespaces make 2 nodes, not 3: give a link"),
        (["--link", "slow"], "--link='slow' is no link"),
    ],
)
def test_what_cannot_be_played_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["comm", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_where_tools_are_missing_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert namespaces.unsupported() == "no network namespaces: unshare, nsenter, ip is not installed"
    result = CliRunner().invoke(app, ["comm", "--nodes", "2"])
    assert result.exit_code == 2
    assert "no network namespaces" in result.output


def sent_again() -> int:
    """Bytes that TCP has: under load one packet overtakes another on two cores."""
    sockets = subprocess.run(["ss", "-tin"], check=True, capture_output=True, text=True).stdout
    return sum(map(int, re.findall(r"bytes_retrans:(\d+)", sockets)))


def over_tcp() -> tuple[float, str, int, int]:
    """On a rank that is a node: a sum, how it went, and the bytes that left the node, by ledger and kernel."""
    group = Group.world(link=Link(1e12, 0.0))
    group.all_reduce(torch.ones(1))
    group.ledger.reset()
    x = torch.full((1_000_001,), float(group.rank + 1))
    group.barrier()
    before = namespaces.device_bytes() - sent_again()
    group.all_reduce(x)
    group.barrier()
    counted = group.ledger.crossed_bytes()["all_reduce"]
    return x.sum().item(), type(group.transport).__name__, counted, namespaces.device_bytes() - sent_again() - before


@pytest.mark.usefixtures("two_namespaces")
def test_what_the_ledger_says_crosses_does_so_between_two_namespaces() -> None:
    for total, transport, counted, sent in namespaces.run(over_tcp, environment={"REFIMPL_RANKS_PER_NODE": "1"}):
        assert (total, transport) == (3_000_003.0, "Throttled")
        assert counted == 4_000_004  # the other's chunk, and the sum of its own
        assert counted <= sent <= 1.15 * counted + 50_000  # and headers, acknowledgements, the barrier
