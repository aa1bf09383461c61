"""`refimpl doctor --topology`: both matrices, the nodes, the advice, and a picture."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from refimpl.cli import topology
from refimpl.cli.main import app
from refimpl.comm.alpha_beta import AlphaBeta
from refimpl.comm.link import Link
from refimpl.comm.topology import Topology

EVERY = [(a, b) for a in range(4) for b in range(a + 1, 4)]
NEAR, FAR = AlphaBeta(2e-6, 8e-11), AlphaBeta(150e-6, 8e-9)
FOUND = Topology(4, {(a, b): NEAR if a // 2 == b // 2 else FAR for a, b in EVERY}, crowd=2.0, gamma=1e-10)


def shown(found: Topology, colours: bool = False) -> str:
    out = io.StringIO()
    kind = "truecolor" if colours else None
    topology.show(found, Console(file=out, width=100, force_terminal=colours, color_system=kind))  # type: ignore[arg-type]
    return out.getvalue()


def test_the_table_has_every_pair_the_nodes_and_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFIMPL_RANKS_PER_NODE", raising=False)
    text = shown(FOUND)
    assert text.count("150") >= 8  # microseconds, both ways
    assert text.count(" 100 ") >= 4  # Gbit/s inside a node
    assert "near: 0 1 | 2 3" in text
    assert "set REFIMPL_RANKS_PER_NODE=2" in text
    assert "two-level" in text
    monkeypatch.setenv("REFIMPL_RANKS_PER_NODE", "2")
    assert "set REFIMPL" not in shown(FOUND)
    one = Topology(2, {(0, 1): AlphaBeta(1e-6, 0.0)}, 1.0, 0.0)
    assert "all 2 ranks, one node" in shown(one)


def test_colours_run_from_the_best_link_to_the_slowest() -> None:
    green, red = (f"48;2;{r};{g};{b}" for r, g, b in (topology.COLOURS[0], topology.COLOURS[-1]))
    lines = shown(FOUND, colours=True).splitlines()
    row = next(line for line in lines if "150" in line)
    assert row.index(green) < row.index(red)  # rank 0: rank 1 is near, 2 and 3 are far
    assert topology.colour(0.5) == topology.COLOURS[1]
    higher, lower = topology.places([1.0, 100.0], more_is_better=True), topology.places([1.0, 100.0], False)
    assert (higher(100.0), higher(1.0), lower(1.0), lower(10.0)) == (0.0, 1.0, 0.0, 0.5)
    assert topology.places([3.0, 3.0], more_is_better=True)(3.0) == 0.0


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    topology.draw(FOUND, tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_measures_real_ranks(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--topology", "--ranks", "2", "--picture", str(tmp_path / "a.svg")])
    assert result.exit_code == 0, result.output
    assert "latency, microseconds" in result.output
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_a_latency_below_a_message_itself_is_said_to_be_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Link(1e9, 1e-5)
    assert "takes 60 us by itself, more than the link's 10 us" in topology.floor(asked, 6e-5)
    assert topology.floor(asked, 9e-6) == topology.floor(None, None) == ""
    monkeypatch.setenv("REFIMPL_LINK", "1Gbit/s 1ns")
    result = CliRunner().invoke(app, ["doctor", "--topology", "--ranks", "2"])
    assert "more than the link's 0.001 us" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["--ranks", "2"],
        ["--topology", "--ranks", "1"],
        ["--picture", "a.png"],
        ["--topology", "--picture", "heat"],
        ["--topology", "--picture", "nowhere/heat.png"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_refused_in_a_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exit_code == 2
