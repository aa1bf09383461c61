"""The demo end to end on real processes, tiny: fp32 equals the oracle, what is counted equals the formula."""

import json
import os
import socket
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner
from worlds import LOOPBACK

from refimpl import launch
from refimpl.cli import demo, options
from refimpl.cli.main import app
from refimpl.cli.train import DTYPES, STAGES, Compared, Task, Trained, oracle, train
from refimpl.model.data import corpus
from refimpl.model.gpt import GPTConfig

TINY = ["--layers", "1", "--width", "64", "--context", "16", "--steps", "2"]
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK}


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def check(found: dict[str, Any], ranks: int, strategies: list[str]) -> None:
    """What every report must say."""
    rows = found["rows"]
    assert [(row["dtype"], row["strategy"]) for row in rows] == [(d, s) for d in DTYPES for s in strategies]
    assert (
        len({row["final_loss"] for row in rows if row["dtype"] == "fp32"} | {found["environment"]["oracle_final_loss"]})
        == 1
    )
    for row in rows:
        assert row["ranks"] == ranks
        assert row["equal_to_oracle"] is (True if row["dtype"] == "fp32" else None), row
        for field in ("bytes_per_parameter", "sent_bytes_per_step"):
            assert row[field]["counted"] == row[field]["formula"], (row["strategy"], row["dtype"], field)
        assert row["bytes_per_parameter"]["counted"]["parameters"] > 0
        assert row["step_ms"] > 0


class Page(HTMLParser):
    """Counts tags and collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]


def test_refimpl_demo(tmp_path: Path) -> None:
    words = ["-m", "refimpl", "demo", *TINY, "--out", str(tmp_path / "a" / "b")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=240)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "a" / "b"
    check(report(out), ranks=2, strategies=list(STAGES))
    assert set(report(out)) == {"environment", "rows"}
    assert max(len(line) for line in done.stdout.splitlines() if "│" in line) <= 110
    for name in ("report.json", "demo.png", "demo.html"):
        assert str(out / name) in done.stdout
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    page = Page()
    page.feed((out / "demo.html").read_text())
    assert page.tags.count("table") == 4
    assert page.tags.count("tr") > 24
    assert page.fetched
    assert all(address.startswith("data:image/png;base64,") for address in page.fetched)


def test_options_choose_strategies_text_and_ranks(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, " * 3)
    options = ["--strategy", "zero3", "--strategy", "zero1", "--ranks", "3", "--text", str(text), "--seed", "5"]
    result = CliRunner().invoke(app, ["demo", *TINY, *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    check(report(tmp_path), ranks=3, strategies=["zero1", "zero3"])
    assert all(row["ratio_to_ddp"] is None for row in report(tmp_path)["rows"])


def test_under_two_torchrun_agents(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
             "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port),
             "-m", "refimpl", "demo", *TINY, "--strategy", "zero3", "--out", str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )
        for node in range(2)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    check(report(tmp_path), ranks=2, strategies=["zero3"])
    assert report(tmp_path)["environment"]["started_by"] == "torchrun"
    assert [out.count("equal to the oracle") for out, _ in outputs] == [1, 0]  # rank 0 alone prints


def test_ranks_that_contradict_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--ranks 4: torchrun started 2 ranks; leave --ranks out"):
        options.ranks_asked(4)
    assert options.ranks_asked(None) == options.ranks_asked(2) == 2


def test_the_oracle_computes_where_the_ranks_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("REFIMPL_DEVICE", raising=False)
    for said, device in ((None, "cuda"), ("cpu", "cpu")):
        if said:
            monkeypatch.setenv("REFIMPL_DEVICE", said)
        assert options.plan(2, ["ddp"], 2, None, 1, 64, 16, 0, "auto", tmp_path).device == device
    assert options.plan(2, ["ddp"], 2, None, 1, 64, 16, 0, "cuda", tmp_path).device == "cuda", "an option counts more"


def test_a_strategy_that_misses_the_oracle_says_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def trained(value: float) -> Trained:
        memory = Compared({"parameters": 1000}, {"parameters": 1000})
        return Trained([5.0, 4.0], {"w": torch.tensor([1.0, value])}, 1.0, memory, Compared({"all_reduce": 8}, {}))

    wrong = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    results = [[[trained(1.0)]], *([[trained(wrong)]] * 2 for _ in DTYPES)]
    monkeypatch.setattr(demo, "on_new_ranks", lambda *_: results)
    plan = options.plan(2, ["ddp"], 2, None, 1, 64, 16, 0, "cpu", tmp_path)
    assert demo.run(plan) == 1
    out = capsys.readouterr().out
    assert out.count(" NO ") == 1
    assert "≠" in out
    assert [row["equal_to_oracle"] for row in report(tmp_path)["rows"]] == [False, None]


def test_the_loss_falls_and_bf16_follows_fp32() -> None:
    task = Task(GPTConfig(context=32, width=64, layers=1, heads=1), corpus(), steps=12, lr=2e-3)
    alone = launch.run(oracle, task, 2, ranks=1, device="cpu")[0][0]
    low = launch.run(train, task, ["zero3"], "bf16", ranks=2, device="cpu")
    assert alone.losses[0] > 5.4
    assert alone.losses[-1] < 4.6
    mean = [sum(parts) / 2 for parts in zip(*(rank[0].losses for rank in low), strict=True)]
    assert mean == pytest.approx(alone.losses, rel=0.02)


def _grown(task: Task) -> int:
    process = psutil.Process()
    before = process.memory_full_info().uss
    train(task, ["ddp", "zero2"], "fp32")
    return process.memory_full_info().uss - before


def test_the_memory_estimate_covers_what_a_rank_takes() -> None:
    task = Task(GPTConfig(), corpus(), steps=2)
    taken = launch.run(_grown, task, ranks=2, device="cpu")
    assert max(taken) < options.rank_bytes(task, strategies=2) < 4 * max(taken)
