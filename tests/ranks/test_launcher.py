"""DeepSpeed's launcher: GPUs that a machine has not are refused (all else: tests/deepspeed/test_launcher.py)."""

import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch.distributed.run import parse_args

from refimpl.ranks.launcher import hostfile, main, parser, torchrun


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_a_gpu_that_is_not_there_is_refused_and_not_trained_without(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=f"{option} 'localhost:1,2': there are 2 GPUs to choose from, 0 to 1"):
        torchrun(parser().parse_args([option, "localhost:1,2", "train.py"]))


def test_without_gpus_the_numbers_are_those_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", int)
    command, _ = torchrun(parser().parse_args(["--include", "localhost:0,1", "train.py"]))
    assert command[:2] == ["--nproc-per-node", "2"]


@pytest.mark.parametrize("words", [["--logs", "out"], ["--r", "1", "--", "--m"], ["--nnodes", "9"]])
def test_a_scripts_arguments_are_not_read_as_torchruns(words: list[str]) -> None:
    command, _ = torchrun(parser().parse_args(["--num_gpus", "2", "train.py", *words]))
    read = parse_args(command)  # torchrun's own
    assert (read.training_script, read.nnodes, read.module) == ("refimpl.as_deepspeed", "1", True)
    assert read.training_script_args == ["train.py", "--local_rank=${local_rank}", *words]


class Started(Exception):
    """Instead of becoming torchrun."""


def started(*_: object) -> NoReturn:
    raise Started


@pytest.mark.parametrize(
    ("options", "gpus"),
    [(["--include", "localhost:1,3"], "1,3"), (["--exclude", "localhost:0,2"], "1,3"), (["--num_gpus", "2"], "2,3")],
)
def test_gpus_are_numbered_as_the_machine_has_them(
    options: list[str], gpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which main would set for good
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if "CUDA_VISIBLE_DEVICES" in os.environ else 4)
    monkeypatch.setattr(os, "execv", started)
    (script := tmp_path / "train.py").touch()
    with pytest.raises(Started):
        main([*options, str(script)])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus
    assert ("CUDA_VISIBLE_DEVICES=2,3 is set aside" in capsys.readouterr().err) == ("--num_gpus" not in options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--master_port", "0"], "--master_port 0: a port is 1 to 65535"),
        (["--master_port", "65536"], "--master_port 65536: a port is 1 to 65535"),
        (["--num_nodes", "2", "--no_ssh", "--node_rank", "2", "--master_addr", "a"], "--node_rank 2: 2 machines are 0"),
        (["--hostfile", "empty"], "--hostfile empty: names no host"),
        (["--hostfile", "binary"], "--hostfile binary: cannot be read"),
        (["--hostfile", "squared"], "--hostfile squared, line 1: "),
        (["--enable_each_rank_log", "empty"], "--enable_each_rank_log empty: cannot be a folder: File exists"),
    ],
)
def test_what_torchrun_would_end_with_a_traceback_or_wait_for_is_refused(
    options: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name, content in {"empty": "# none\n", "squared": "localhost slots=\u00b2\n", "train.py": ""}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", started)
    with pytest.raises(SystemExit) as left:
        main([*options, "train.py"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1


def test_a_host_file_that_is_not_there_is_said_and_what_follows_slots_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "execv", started)
    (script := tmp_path / "train.py").touch()
    with pytest.raises(Started):
        main(["--hostfile", str(tmp_path / "hosts"), str(script)])
    assert f"--hostfile {tmp_path / 'hosts'}: no such file: this machine alone" in capsys.readouterr().err
    (tmp_path / "hosts").write_text("localhost slots=3 max_slots=8\n")
    assert hostfile(tmp_path / "hosts") == {"localhost": 3}
