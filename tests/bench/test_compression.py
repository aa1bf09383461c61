"""The bench of compression: equal time by arithmetic, every method learns, what is drawn, what is refused."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import worlds
from typer.testing import CliRunner

from refimpl.bench.cli import app
from refimpl.bench.compression import PERIOD, Learned, Measured, Task, curves, draw, measure, of_period
from refimpl.bench.methods import FIRST, METHODS
from refimpl.bench.table import markdown
from refimpl.model.gpt import GPTConfig

TINY = GPTConfig(vocab=256, context=8, width=8, layers=1, heads=2)


def by_hand(steps: int = 100) -> Measured:
    """DDP learns from 3.0 on by 0.01 a step, top-k half as fast but in a quarter of its time; 1-bit Adam as DDP."""
    fast, slow = [3.0 - 0.01 * step for step in range(steps + 1)], [3.0 - 0.005 * step for step in range(steps + 1)]
    learned = {FIRST: Learned(fast, 1e6), "top-k 1%": Learned(slow, 1e4), "1-bit Adam": Learned(fast, 5e4)}
    ms = {FIRST: 40.0, "top-k 1%": 10.0, "1-bit Adam": 20.0}
    return Measured("1Gbit/s 100us", 2, Task(TINY, steps), learned, ms)


def test_losses_are_compared_after_equal_time() -> None:
    ddp, top, adam = by_hand().rows()
    assert [row.seconds for row in (ddp, top, adam)] == pytest.approx([1.0] * 3)  # 100 steps of 10 ms
    assert (ddp.steps, top.steps) == (25, 100)
    assert adam.steps == 20 + (1000 - 20 * 40) // 20  # its warm-up of 20 steps takes DDP's time
    assert ddp.loss == pytest.approx(3.0 - 0.01 * 25)
    assert top.loss == pytest.approx(3.0 - 0.005 * 100)
    assert (ddp.pays, top.pays, adam.pays) == ("-", "yes", "yes")
    assert (top.times_ddp, top.sent_mb) == (0.25, 0.01)


def test_a_method_that_sends_nothing_on_a_link_as_fast_as_it_computes_does_not_pay() -> None:
    one = by_hand()
    one.step_ms["top-k 1%"] = 60.0
    one.learned["1-bit Adam"] = Learned([x + 1e-3 for x in one.learned[FIRST].losses], 5e4)
    one.step_ms["1-bit Adam"] = 40.0
    assert [row.pays for row in one.rows()] == ["-", "no", "even"]


def test_a_meeting_counts_as_often_as_it_comes_and_a_busy_moment_not_at_all() -> None:
    period = [1.0] * (PERIOD - 1) + [1.0 + PERIOD]
    disturbed = [50.0, *period[1:]]
    assert of_period([*disturbed, *period, *[50.0] * PERIOD]) == pytest.approx(2.0)


def test_every_method_trains_and_sends_less_than_ddp() -> None:
    names = [method.name for method in METHODS]
    found = worlds.run(curves, Task(TINY, steps=3 * PERIOD, batch=2), names)[0]
    assert list(found) == names
    for name, one in found.items():
        assert len(one.losses) == 3 * PERIOD + 1
        assert all(map(math.isfinite, one.losses)), name
        assert one.losses[0] == found[FIRST].losses[0]  # all begin with the same weights and texts
        assert (one.sent < found[FIRST].sent) == (name not in (FIRST, "LAMB")), name
    assert found[FIRST].losses[-1] < found[FIRST].losses[0]
    assert found["DDP, bf16 wire"].sent == pytest.approx(found[FIRST].sent / 2, rel=0.02)  # and the norm's numbers
    once = found[FIRST].sent / PERIOD  # but for the padding of DDP's buckets
    assert found[f"local SGD, every {PERIOD}"].sent == pytest.approx(once, rel=0.05)


def test_a_run_over_two_links(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = [FIRST, "1-bit Adam"]
    found = list(measure(2, Task(TINY, steps=PERIOD, batch=1, turns=1), ["1Gbit/s 1us", "10Gbit/s"], names))
    assert [one.link for one in found] == ["1Gbit/s 1us", "10Gbit/s"]
    assert "more than the link's 1 us: this machine plays no shorter latency" in capfd.readouterr().out
    assert found[0].learned == found[1].learned  # no bit depends on the link
    assert [[row.method for row in one.rows()] for one in found] == [names] * 2
    draw(found, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_the_readmes_table_has_a_line_a_method_and_a_column_a_link() -> None:
    one, other = by_hand(), by_hand()
    other.link, other.step_ms = "10Gbit/s", {FIRST: 10.0, "top-k 1%": 20.0, "1-bit Adam": 10.0}
    lines = markdown([asdict(row) for found in (one, other) for row in found.rows()]).splitlines()
    assert lines[0] == "| method | MB sent a step | 1Gbit/s 100us | 10Gbit/s |"
    assert lines[2:] == [
        "| DDP | 1.00 | 1.00, 2.75 | 1.00, 2.00 |",
        "| top-k 1% | 0.01 | 0.25, 2.50 **pays** | 2.00, 2.75 no |",
        "| 1-bit Adam | 0.05 | 0.50, 2.70 **pays** | 1.00, 2.00 even |",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "slow"], "--link='slow' is no link"),
        (["--method", "top-k"], "no method 'top-k': choose from 'DDP', "),
        (["--context", "1000000"], "bytes is too short: a context of 1000000 needs 1000001"),
        (["--plot", "losses"], "--plot losses: it is drawn as PNG: name it losses.png"),
    ],
)
def test_what_there_is_not_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["compression", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
