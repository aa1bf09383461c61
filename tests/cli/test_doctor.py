"""The doctor: it looks at everything, and what is missing comes with advice."""

import pytest
import torch
from typer.testing import CliRunner

from refimpl.cli import doctor
from refimpl.cli.main import app


def test_refimpl_doctor_runs() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    for word in (
        "cores",
        "memory",
        torch.__version__,
        "GPUs",
        "gloo yes",
        "bf16",
        "triton",
        "write",
        "ranks",
        "transport",
    ):
        assert word in result.stdout


def test_what_is_missing_comes_with_advice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "native_low_precision", lambda device, dtype: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "cores", lambda: 1)
    missing = [doctor._precision("bf16", torch.bfloat16), doctor._gpus(), doctor._triton(), doctor._cores()]
    assert all(finding.advice for finding in missing)
    doctor.show(missing)
    out = capsys.readouterr().out
    assert out.count("! ") == 4
    assert "emulated" in out


def test_nothing_missing_needs_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "native_low_precision", lambda device, dtype: True)
    monkeypatch.setattr(doctor, "cores", lambda: 64)
    assert not doctor._precision("bf16", torch.bfloat16).advice
    assert not doctor._cores().advice


def test_ranks_that_fail_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise doctor.launch.RankError("rank 1 raised ValueError: REFIMPL_TRANSPORT must be gloo\n\nTraceback ...")

    monkeypatch.setattr(doctor.launch, "run", fails)
    found = doctor._tried("transport", doctor._transport)
    assert found == doctor.Finding("transport", "fails", "rank 1 raised ValueError: REFIMPL_TRANSPORT must be gloo")
