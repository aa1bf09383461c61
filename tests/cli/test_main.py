"""The command line: it starts without torch, and refuses bad input in one line with exit status 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import refimpl
from refimpl.bench.options import writable
from refimpl.cli.main import main


def refimpl_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["refimpl", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--ranks 0", "--ranks 0: at least 1 rank is needed"),
        ("--ranks -1", "--ranks -1: at least 1 rank is needed"),
        ("--ranks two", "'--ranks'"),
        ("--ranks 1000000", "GB are free: enough for "),
        ("--context 1000000000", "GB are free: try a smaller --width, --layers or --context"),
        ("--width 100", "--width 100: it must be a multiple of 64, because torch's fused AdamW"),
        ("--width 0", "--width 0: it must be at least 1"),
        ("--layers 0", "--layers 0: it must be at least 1"),
        ("--context -3", "--context -3: it must be at least 1"),
        ("--steps 1", "--steps 1: at least 2 are needed, before its first the optimizer has no state to count"),
        ("--seed -1", "--seed -1: it must not be negative"),
        ("--seed 9223372036854775808", "--seed 9223372036854775808: it must be below 2**63"),
        ("--strategy zero4", "--strategy zero4: there is no such strategy; choose from ddp, zero1, zero2, zero3"),
        ("--device tpu", "--device tpu: choose from auto, cpu, cuda"),
        ("--text missing.txt", "cannot read missing.txt: No such file"),
        ("--text empty.txt", "empty.txt is empty"),
        ("--text short.txt", "short.txt has 100 bytes: a context of 128 needs at least 129"),
        ("--text binary.txt", "binary.txt is a binary file: byte 3 is NUL"),
        ("--text latin.txt", "latin.txt is not UTF-8 text: byte 0 is 0xe9"),
        ("--text .", "cannot read .: Is a directory"),
        ("--out short.txt", "--out short.txt: it is a file, and a folder is needed"),
        (
            "--out short.txt/deeper",
            "--out short.txt/deeper: cannot write there: Not a directory; choose another folder",
        ),
        ("--out /proc/demo", "--out /proc/demo: cannot write there: "),
        ("--nonsense", "--nonsense"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: str,
    reason: str,
) -> None:
    contents = {"empty": b"", "short": b"a" * 100, "binary": b"abc\0" * 100, "latin": "été".encode("latin-1") * 100}
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    assert refimpl_command(monkeypatch, "demo", *arguments.split()) == 2
    out, err = capsys.readouterr()
    assert reason in err
    assert err.count("\n") == 1
    assert err.startswith("refimpl")
    assert out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert refimpl_command(monkeypatch, "demo", "--device", "cuda") == 2
    assert "--device cuda: torch finds no GPU on this machine" in capsys.readouterr().err


def test_version_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert refimpl_command(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == refimpl.__version__
    assert refimpl_command(monkeypatch) == 0
    assert {"demo", "doctor", "bench"} <= set(capsys.readouterr().out.split())
    assert refimpl_command(monkeypatch, "dance") == 2
    assert "dance" in capsys.readouterr().err


def test_the_command_line_does_not_wait_for_torch() -> None:
    script = "import sys, refimpl.cli.main; print(sorted({'torch', 'matplotlib', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_python_m_refimpl_refuses_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-m", "refimpl", "demo", "--width", "65"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("refimpl demo: --width 65: it must be a multiple of 64")
    assert done.stderr.count("\n") == 1


def test_a_terminal_that_knows_ascii_alone_gets_the_rest() -> None:
    script = "import atexit, refimpl.cli.main as cli; atexit.register(print, '\u2713 disk'); cli.main()"
    asked = [sys.executable, "-c", script, "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert "? disk" in done.stdout
    assert done.returncode == 0


def test_a_bench_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert refimpl_command(monkeypatch, "bench", "zero", "--nonsense") == 2
    assert "--nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("file", [".", "short.txt/report.json", "/proc/report.json", "nowhere/report.json"])
def test_a_bench_that_cannot_write_its_report_is_refused_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str
) -> None:
    def measured(*_: object, **__: object) -> None:
        pytest.fail("measured first")

    (tmp_path / "short.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    for bench in ("zero", "comm"):
        monkeypatch.setattr(f"refimpl.bench.{bench}.measure", measured)
        assert refimpl_command(monkeypatch, "bench", bench, "--json", file) == 2
        err = capsys.readouterr().err
        assert f"--json {file}: cannot write there: " in err
        assert err.count("\n") == 1


def test_a_report_that_is_there_stays_until_there_is_a_new_one(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for file in (old, new):
        assert writable(file) == file
    assert old.read_text() == "{}"
    assert not new.exists()


def test_a_usage_error_names_the_command_and_help_stands_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refimpl_command(monkeypatch, "hint") == 2
    names = "chapter", "CHAPTER"  # newer typers, older ones
    assert capsys.readouterr().err in [f"refimpl hint: Missing argument '{name}'.\n" for name in names]
    assert refimpl_command(monkeypatch, "exercise") == 2
    shown = "".join(capsys.readouterr())
    assert "watch" in shown
    assert "refimpl:" not in shown


@pytest.mark.parametrize("command", ["bench", "checkpoint", "exercise", "plan"])
def test_no_completion_is_offered_for_a_name_that_no_shell_can_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert refimpl_command(monkeypatch, command, "--show-completion") == 2
    assert "No such option: --show-completion" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "interrupted"),
    [
        ("bench comm", "refimpl.bench.comm.measure"),
        ("checkpoint show .", "refimpl.cli.checkpoint.refusing"),
        ("exercise reset 02_ddp", "refimpl.cli.exercise.find_chapter"),
        ("plan --params 7B", "refimpl.plan.search.search"),
    ],
)
def test_ctrl_c_is_no_success_for_what_follows_in_a_script(
    monkeypatch: pytest.MonkeyPatch, command: str, interrupted: str
) -> None:
    def ctrl_c(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, ctrl_c)
    assert refimpl_command(monkeypatch, *command.split()) == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_output_that_finds_no_room_is_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert refimpl_command(monkeypatch, *arguments) == 2
        monkeypatch.undo()
    assert capsys.readouterr().err == "refimpl: [Errno 28] No space left on device\n"
