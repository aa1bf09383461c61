"""The program of `make gpu-check`, on a CPU: every part in miniature, and a report whatever happens."""

import faulthandler
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import sysconfig
import warnings
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from stream_log import Recorder, Watch, races
from torch import nn

from refimpl import launch
from refimpl.bench import comm, zero
from refimpl.bench.kernels import Limits, Row
from refimpl.comm.collectives import Op
from refimpl.comm.work import Steps
from refimpl.gpu import agreement, benches, libcuda, machine, part, sanitizers, several, timeline
from refimpl.gpu import races as hunt
from refimpl.gpu.check import PARTS, TOTAL, check, folder_of, main, run_part
from refimpl.gpu.machine import launcher_lacks
from refimpl.gpu.part import Part
from refimpl.gpu.report import Report, Result, driver, triton_version, versions, why_none
from refimpl.gpu.steady import waits_among
from refimpl.gpu.timeline import kernels_of, length, merged
from refimpl.gpu.twins import Twins
from refimpl.gpu.workload import STAGES, Workload, differing
from refimpl.kernels.case import Case, cases
from refimpl.ranks import server

CPU = torch.device("cpu")
SMALL = Workload(width=64, layers=1, steps=2)


@pytest.mark.parametrize("name", [part for part in PARTS if part not in ("suite", "kernels")])
def test_every_part_runs_in_miniature(name: str) -> None:
    part: Part = importlib.import_module(f"refimpl.gpu.{name}")
    findings = list(part.run(CPU, 300))
    assert findings
    assert [f for f in findings if f.passed is False] == []
    assert json.loads(json.dumps([f.value for f in findings])) is not None


def test_what_several_ranks_exchange_is_looked_at_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its ways; what is wrong on one rank is told with it, and hides no other way."""
    ways = [{"a": "", "b": ""}, {"a": "ValueError: no", "b": ""}]
    asked: list[int] = []

    def run(fn: object, ranks: int, **_: object) -> list[dict[str, object]]:
        asked.append(ranks)
        return [{"all_reduce sum": True}] if ranks == 1 else ways  # type: ignore[return-value]

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(machine, "DDP", MagicMock(__name__="DDP"))
    monkeypatch.setattr(machine, "Zero3", MagicMock(__name__="Zero3"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    found = {f.name: (f.value, f.passed) for f in machine.run(torch.device("cuda"), 40)}
    assert asked == [1, 8]
    assert found["8 ranks, a"] == ({"rank 1": "ValueError: no"}, False)
    assert found["8 ranks, b"] == ("right", True)
    assert several.tried(lambda group: ["x"] * 9, None) == "x, x, x, x, x"  # type: ignore[arg-type]
    assert several.tried(lambda group: [][0], None) == "IndexError: list index out of range"  # type: ignore[arg-type]


def test_a_kernel_is_timed_in_miniature(tmp_path: Path) -> None:
    """In a process of its own: in this one Triton may interpret, see tests/kernels/conftest.py."""
    report = check("cpu", tmp_path, ["kernels"])
    assert report.passed, report.results
    assert any("eager" in finding["name"] for finding in report.results[0].findings)


def test_the_parts_fit_into_nine_minutes() -> None:
    assert sum(PARTS.values()) <= TOTAL < 540


def test_a_part_may_use_what_those_before_it_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose first import, or first compilation, is slow; and a quarter of what those behind it need."""
    import refimpl.gpu.check as module

    asked: list[tuple[str, float, float]] = []

    def run(name: str, device: str, seconds: float, out: Path, most: float) -> Result:
        asked.append((name, seconds, most))
        clock.append(clock[-1] + 5)
        return Result(name, 5.0, "", [], [])

    clock = [0.0]
    monkeypatch.setattr(module, "run_part", run)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    monkeypatch.setattr(module, "PARTS", {"machine": 40, "races": 20, "suite": 30})
    check("cuda", tmp_path, ["machine", "races", "suite"], total=90)
    assert asked == [("machine", 40, 52.5), ("races", 20, 62.5), ("suite", 30, 80)]
    asked.clear()
    clock[:] = [100.0]
    check("cuda", tmp_path, ["machine", "races", "suite"], total=90, begun=55)  # torch's import took half of it
    assert asked == [("machine", 20, 20), ("races", 16, 17.5), ("suite", 30, 35)]


def test_a_part_says_where_it_stands_before_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from its start: importing torch takes seconds before it can ask for that."""
    asked: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", asked.append)
    monkeypatch.setattr(part, "time", SimpleNamespace(monotonic=lambda: 1007.0))
    aims: list[float] = []
    stands = SimpleNamespace(run=lambda device, seconds: iter(aims.append(seconds) or ()))  # type: ignore[func-returns-value]
    monkeypatch.setitem(sys.modules, "refimpl.gpu.stands", stands)
    part.main("stands", "cpu", "30", "1050", str(tmp_path / "file"))
    part.main("stands", "cpu", "30", "1020", str(tmp_path / "file"))
    assert asked == [1050 - part.WORDS - 1007, 1020 - part.WORDS - 1007]
    assert aims == [30, 1020 - part.WORDS - 1007], "what torch's import has taken of it is gone"


def test_of_a_hang_each_ranks_place_is_told_before_the_part_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the world, whose patience is shorter: it asks the ranks, which the end of a part kills."""
    waits: list[float] = []

    def call(fn: object, *_: object, timeout: float = 0) -> list[object]:
        waits.append(timeout)
        return [({"weight": torch.ones(1)}, [1.0])]

    world = MagicMock()
    world.return_value.__enter__.return_value.call.side_effect = call
    monkeypatch.setattr(launch, "World", world)
    assert all(finding.passed is not False for finding in agreement.run(CPU, 60))
    assert len(waits) > 20
    assert max(waits) <= 60 / 2


def test_a_part_that_fails_hangs_or_has_no_time_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import refimpl.gpu.check as module

    monkeypatch.setattr(module, "MINIATURE", 0.01)
    report = check("cpu", tmp_path, ["races"])
    monkeypatch.setattr(module, "MINIATURE", 60)
    report.results += check("nonsense", tmp_path, ["machine"]).results
    report.results += check("cuda", tmp_path, ["steady"], total=1).results
    assert [r.ended for r in report.results] == ["not done after 0 s", "exit code 1", "no time was left"]
    report.write(tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["passed"] is False
    assert [part["verdict"] for part in data["parts"]] == [r.verdict for r in report.results]
    assert "RuntimeError" in "".join(data["parts"][1]["log"])
    text = (tmp_path / "report.md").read_text()
    assert "| steady | FAILED (no time was left) | 0.0 |" in text
    assert "says nothing about GPUs" in text


def test_what_a_part_found_before_its_time_was_over_is_kept(tmp_path: Path) -> None:
    lines = [{"name": "a", "value": 1.0, "passed": True}, {"name": "b", "value": {"x": [1]}, "passed": False}]
    report = Report("cuda", [Result("races", 3.0, "", lines, [])], {"date": "2026-01-01"})
    assert "- ok: a: 1\n- **FAILED**: b: x 1\n" in report.markdown()
    assert report.results[0].verdict == "FAILED (1 of 2 checks)"
    assert not report.passed


def test_each_test_is_a_finding_as_soon_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be imported, and a warning, take no other test along."""
    from refimpl.gpu import suite  # it imports triton: see tests/kernels/conftest.py

    file = tmp_path / "tests" / "test_some.py"
    file.parent.mkdir()
    file.write_text(SOME_TESTS)
    (file.parent / "test_broken.py").write_text("import nobody_has_this  # mark.gpu")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\nfilterwarnings = ["error"]\n')
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "INSTALLED", False)
    found = {f.name.rpartition("::")[2]: f.passed for f in suite.run(torch.device("cuda"), 60)}
    assert found == {
        "test_warns[a case]": True, "test_fails": False, "test_needs_more": None, "tests marked gpu": False,
    }  # fmt: skip


SOME_TESTS = """
import warnings, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("what", ["a case"])
def test_warns(what):
    warnings.warn("deprecated")

def test_fails():
    assert False

def test_needs_more():
    pytest.skip("two GPUs")
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="compilers for a GPU are Linux's")
def test_a_compiler_that_crashes_takes_no_test_along() -> None:
    from refimpl.gpu import suite

    (said,) = suite.on_all_cores(os._exit, 1)
    assert said.startswith("a compiler's process crashed")


def test_without_pytest_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from refimpl.gpu import suite

    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)
    (found,) = suite.run(CPU, 60)
    assert f"{sys.executable} -m pip install pytest, then make gpu-check PYTHON={sys.executable} ARGS=" in found.value
    assert found.passed is None  # torch and Triton are all that is promised to be enough


def test_an_older_pytest_can_read_what_all_tests_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image's may be old: the class of who reports has had a public name since 8.4."""
    monkeypatch.delattr(pytest, "TerminalReporter")
    monkeypatch.setattr(server, "PRELOAD", [])
    assert "pytest_terminal_summary" in runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))


def test_a_kernel_that_is_off_from_eager_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pytest, and so the tests against float64, are not."""
    from refimpl.gpu import kernels

    bound = next(cases(small=True)).bound

    def timed(case: Case, *_: object, **__: object) -> list[Row]:
        rows = (("ours", 3 * bound), ("ours", bound), ("ours", float("nan")), ("eager", 0.0))
        return [Row(case.name, "forward", way, 1.0, 1.0, None, 0.5, 1.0, off) for way, off in rows]

    monkeypatch.setattr(kernels, "find_limits", lambda device: (Limits(1e12, 1e12), []))
    monkeypatch.setattr(kernels, "heat", timed)
    assert [f.passed for f in kernels.run(CPU, 60)][1:] == [False, True, False, None]


def test_kernels_for_which_there_is_no_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from refimpl.gpu import kernels

    monkeypatch.setattr(kernels, "find_limits", lambda device: (Limits(1e12, 1e12), []))
    assert [f.name for f in kernels.run(CPU, 0)][1:] == ["no time was left for"]


def test_other_losses_than_a_peers_hide_no_other_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(laps: object) -> None:
        raise ValueError("rank 0, step 3: the loss is 5.0 with ours and 4.0 with torch's")

    world = MagicMock()
    world.return_value.__enter__.return_value.call.side_effect = lambda heat, *_, **__: [
        {"a way": [1.0]} if heat is comm.heat else zero.Lap({"a way": [1.0]}, {})
    ]
    monkeypatch.setattr(launch, "World", world)
    monkeypatch.setattr(zero, "check_same_work", other)
    found = list(benches.run(CPU, 60))
    assert [f.passed for f in found] == [False] * len(zero.STAGES) + [None] * len(comm.COLLECTIVES)


def test_a_kernel_beside_which_torch_finds_no_memory_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from refimpl.gpu import kernels

    def full(*_: object, **__: object) -> list[object]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kernels, "find_limits", lambda device: (Limits(1e12, 1e12), []))
    monkeypatch.setattr(kernels, "heat", full)
    found = list(kernels.run(CPU, 60))[1]
    assert (found.name, found.passed) == (next(cases(small=True)).name, None)


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from refimpl.gpu import suite

    def broken(case: Case, capability: int) -> list[object]:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(suite, "kernels_of", broken)
    assert suite.compiled(0, 90) == f"{next(cases()).name}: RuntimeError: PassManager::run failed"


def test_that_kernels_compile_is_seen_without_a_tool_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton finds its assembler by itself; cuobjdump, which reads registers, is not in every image's."""
    from refimpl.gpu import suite
    from refimpl.kernels import compiled

    def not_there(*_: object, **__: object) -> None:
        raise FileNotFoundError("cuobjdump")

    kernel = SimpleNamespace(hash="a", asm={"cubin": b""}, metadata=None)
    monkeypatch.setattr(compiled, "rehearse", lambda capability: nullcontext([kernel]))
    monkeypatch.setattr(compiled, "forward_and_backward", lambda *_: None)
    monkeypatch.setattr(compiled.subprocess, "run", not_there)
    assert suite.compiled(0, 90) == ""


def test_what_a_part_leaves_behind_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compute-sanitizer's program does, when compute-sanitizer alone is killed since its time is over."""
    held, program = tmp_path / "held", tmp_path / "python"
    os.mkfifo(held)
    program.write_text(f"#!/bin/sh\nexec 3> {held}\nsleep 60 &\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    assert run_part("machine", "cpu", 60, tmp_path).ended == "it found nothing"
    assert select.select([reader], [], [], 30)[0] == [reader]  # nobody writes any more
    os.close(reader)


STAYS = """#!{python}
import runpy, signal, subprocess, sys
from types import SimpleNamespace
from refimpl import launch

def stay():
    import os, signal, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    launch.report([os.getpid(), child.pid])
    signal.pause()

def run(device, seconds):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(child.pid, flush=True)
    launch.run(stay, ranks=2, timeout=None, on_report=lambda rank, pids: print(*pids, flush=True))
    yield

sys.modules["refimpl.gpu.stays"] = SimpleNamespace(run=run)
print(__import__("os").getpid(), flush=True)
del sys.argv[1:3]
runpy.run_module("refimpl.gpu.part", run_name="__main__")
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells when a process that is no child has ended")
def test_no_part_outlives_a_check_that_is_killed(tmp_path: Path) -> None:
    """Nor does what the part has started, and its ranks have: they would hold the GPU."""
    program, log = tmp_path / "python", tmp_path / "stays.log"
    program.write_text(STAYS.format(python=sys.executable))
    program.chmod(0o755)
    os.mkfifo(log)  # what a part prints goes to its log
    code = "import sys; from pathlib import Path; from refimpl.gpu.check import run_part; sys.executable = sys.argv[1];"
    code += "run_part('stays', 'cpu', 300, Path(sys.argv[2]))"
    check = subprocess.Popen([sys.executable, "-c", code, program, tmp_path])
    with log.open("r+b", buffering=0) as printed:  # also to write: it has no end
        pids = [int(word) for _ in range(4) for word in printed.readline().split()]
    ends = [os.pidfd_open(pid) for pid in pids]
    try:
        check.kill()
        check.wait()
        gone = [bool(select.select([end], [], [], 30)[0]) for end in ends]
    finally:
        for end in ends:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(end, signal.SIGKILL)
            os.close(end)
    assert gone == [True] * 6, "the part, its child, two ranks and a child of each"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_the_check_finds_a_report(end: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "refimpl.gpu", "--device", "cpu", "--part", "races", "machine"]
    with subprocess.Popen([*command, "--out", tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "races ...\n"
        process.send_signal(end)
        process.communicate()
    assert process.returncode == 1
    [part] = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert (part["name"], part["ended"]) == ("races", "stopped from outside")


def test_a_tool_that_does_not_work_here_says_nothing_of_ours(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    found = []
    none, some = "echo ERROR SUMMARY: 0 errors; exit 1", "echo ERROR SUMMARY: 12 errors; exit 1"  # the steps' own code
    own = "echo Internal Sanitizer Error: Device not supported; echo ERROR SUMMARY: 1 error; exit 9"
    for says in (
        "exit 0",
        "echo Device not supported; exit 9",
        "echo ERROR SUMMARY: 2 errors; exit 9",
        none,
        some,
        own,
    ):
        tool.write_text(f"#!/bin/sh\n{says}\n")
        tool.chmod(0o755)
        found.append(sanitizers._ran("memcheck", [str(tool)], [], CPU, 60, {}).passed)
    assert found == [True, None, False, None, False, None]


def test_a_profiler_that_sees_no_kernel_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUPTI does not work in every container."""
    monkeypatch.setattr(timeline, "profile", MagicMock())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    stage, group = MagicMock(), SimpleNamespace(rank=0, device=torch.device("cuda"))
    monkeypatch.setattr(Workload, "stage", lambda *_, **__: stage)
    monkeypatch.setattr(Workload, "step", lambda *_: None)
    monkeypatch.setattr(Workload, "batch", lambda *_: MagicMock())
    found: Any = timeline.profiled("zero2", SMALL, group)  # type: ignore[arg-type]
    assert found["kernels"].startswith("none seen: CUPTI")
    assert found["host ms"] >= 0


def test_where_triton_does_not_look_for_the_driver_its_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To each part, and in the report: all kernels would fail where ldconfig does not list what torch has found."""
    if find_spec("triton"):
        importlib.import_module("triton")  # or it would look for its drivers in the one below
    looks = SimpleNamespace(libcuda_dirs=lambda: ["/usr/lib"])
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", looks)
    assert libcuda.missed() == ""
    monkeypatch.setattr(libcuda, "loaded", lambda: "/opt/driver")
    assert libcuda.missed() == ""

    def not_there() -> None:
        raise AssertionError("libcuda.so cannot found!")

    looks.libcuda_dirs = not_there  # type: ignore[assignment]
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "folder $TRITON_LIBCUDA_PATH"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert "folder /opt/driver" in run_part("machine", "cpu", 60, tmp_path).log
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "set TRITON_LIBCUDA_PATH=/opt/driver" in versions()["libcuda"]


def test_triton_is_asked_for_its_version_whatever_its_package_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0+git"))
    assert triton_version() == "3.6.0+git"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton_version() == "none"


def test_the_report_of_one_part_does_not_replace_the_whole_one() -> None:
    assert folder_of(list(PARTS)) == Path("out/gpu")
    assert folder_of(["suite", "kernels"]) == Path("out/gpu-suite-kernels")


def test_where_no_folder_can_be_made_it_says_so_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--device", "cpu", "--out", str(tmp_path / "file" / "gpu")]) == 2
    assert "Not a directory; name another folder: ARGS='--out /tmp/gpu'" in capsys.readouterr().err


def test_a_loss_that_is_no_number_leaves_json(tmp_path: Path) -> None:
    finding = {"name": "every loss is finite", "value": {"last": float("nan")}, "passed": False}
    Report("cuda", [Result("agreement", 3.0, "", [finding], [])], {}).write(tmp_path)
    assert "NaN" not in (tmp_path / "report.json").read_text()
    assert "every loss is finite: last nan" in (tmp_path / "report.md").read_text()


def test_a_machine_without_nvidia_smi_gets_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert driver() == "unknown: nvidia-smi does not say"


def test_that_waits_are_looked_for_is_no_wait() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not detect all synchronizing ...", stacklevel=1
        )
        warnings.warn(
            "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:150.)", stacklevel=1
        )
    assert waits_among(told) == [f"test_check.py:{told[1].lineno}"]


def test_what_a_profiler_says_of_the_host_is_no_kernel() -> None:
    """Kineto tells the span of every `record_function`, as of an optimizer's step, on the device too."""
    kernel, span, host = (
        SimpleNamespace(device_type=SimpleNamespace(name=name), is_user_annotation=said)
        for name, said in (("CUDA", False), ("CUDA", True), ("CPU", False))
    )
    assert kernels_of([kernel, span, host]) == [kernel]


def test_the_ranks_of_several_gpus_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a part of 30 seconds: NCCL takes some to begin."""
    world = MagicMock()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(launch, "World", world)
    assert [f.name for f in timeline.run(torch.device("cuda"), 30)] == [f"{stage}, NCCL" for stage in STAGES]
    world.assert_called_once_with(8, device="cuda")


@pytest.mark.parametrize(
    ("wrote", "found"),
    [('{"name": "a", "value": {}, "passed": true}\n', ["a"]), ('{"name": "a", "value": {}', []), ("", [])],
)
def test_a_part_that_is_killed_keeps_what_it_found(
    wrote: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what it was writing then, as on a disk that was full."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nfor file; do :; done\nprintf '{wrote}' > $file\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    result = run_part("machine", "cpu", 60, tmp_path)
    assert (result.ended, [finding["name"] for finding in result.findings]) == ("SIGKILL", found)


def test_where_no_report_can_be_written_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Report, "write", full)
    monkeypatch.setattr("refimpl.gpu.check.run_part", full)
    report = check("cpu", tmp_path, ["machine"])
    assert [result.ended for result in report.results] == ["[Errno 28] No space left on device"]
    assert "No space left on device. It is:\n# GPU check\n" in capsys.readouterr().out


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built for CPUs" in why_none()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("refimpl.gpu.report.driver", lambda: "535.1, compute mode Default, MIG [N/A]")
    assert "perhaps too old for CUDA 13.0" in why_none()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides all" in why_none()


def test_what_triton_needs_besides_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert launcher_lacks().startswith("no C compiler: install gcc")
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: "/where/it/was/built")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    assert not launcher_lacks()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: "/nowhere")
    assert launcher_lacks().startswith("no /nowhere/Python.h: install Python's headers")


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_without_a_gpu_it_says_so_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "gpu")]) == 2
    assert "torch finds no GPU here, so nothing was checked" in capsys.readouterr().err
    assert not (tmp_path / "gpu").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_the_twins_themselves_do_not_race(stage: str) -> None:
    recorder = Recorder()
    with Watch(recorder):
        hunt.trained(stage, SMALL, CPU, recorder, lambda: None)
    assert races(recorder.log) == []


@pytest.mark.parametrize("stage", STAGES)
def test_what_arrives_too_late_shows_in_the_bits(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last reduction, as whoever does not wait for it would find it: not there yet."""
    truth, _ = hunt.trained(stage, SMALL, CPU, hunt.Streams(), lambda: None)
    op = "all_reduce" if stage == "ddp" else "reduce_scatter"
    original, calls = getattr(Twins, op), []

    def late(twins: Twins, x: torch.Tensor, *more: object) -> Steps:
        calls.append(op)
        if len(calls) == 3:
            x.fill_(float("nan"))
            yield from ()
        else:
            yield from original(twins, x, *more)

    monkeypatch.setattr(Twins, op, late)
    found, _ = hunt.trained(stage, SMALL, CPU, hunt.Streams(), lambda: None)
    assert len(calls) > 3
    assert differing(truth, found) != []


def test_a_run_that_stumbles_without_a_wait_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm's message, read before it is there: its words are compared, and NaN is no whole number."""
    original = Twins.all_reduce

    def late(twins: Twins, x: torch.Tensor, op: Op) -> Steps:
        yield from original(twins, x, op)
        if x.dtype == torch.float64:
            x.fill_(float("nan"))

    monkeypatch.setattr(Twins, "all_reduce", late)
    with pytest.raises(ValueError, match="NaN"):
        hunt.trained("zero2", SMALL, CPU, hunt.Streams(), lambda: None)
    found = list(hunt.left_out(SMALL, CPU, {stage: {} for stage in STAGES}, dict.fromkeys(STAGES, 1), 0))
    assert [f.value for f in found] == [{"runs": 1, "seen": 1}] * len(STAGES)


def test_times_side_by_side_are_counted_once() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert length([(0, 4), (5, 6)]) == 5
