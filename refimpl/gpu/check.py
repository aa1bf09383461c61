"""Run the parts one after the other, each in a process of its own and for so long at most, and write the report.

An illegal access leaves a process without its GPU for good, and a hang leaves it without an end: neither may take the
other parts along. The report is written anew after each part. What is compiled is kept beside it: a home folder that
cannot be written to fails nothing. The time that is left is shared: a part that needs longer than it should has what
those before it have left over, and some of what those behind it should take, which then aim at less. Two seconds before
it is killed it says where it stands.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from refimpl.gpu import libcuda
from refimpl.gpu.report import Report, Result, why_none
from refimpl.ranks.errors import signal_name
from refimpl.ranks.life import held

# In this order, with the seconds that each should take.
PARTS = {
    "machine": 40,  # versions, alignment, NCCL with one rank, every way between several
    "agreement": 90,  # every stage ends with the same bits
    "races": 65,  # the race hunt
    "sanitizers": 55,  # torch's and CUDA's own
    "steady": 30,  # host syncs and memory of a warm step
    "timeline": 30,  # what runs beside what
    "suite": 95,  # the tests marked gpu
    "kernels": 55,  # beside eager torch
    "benches": 45,  # beside peers
}
TOTAL = 525.0  # from the program's start, torch's import and all; the rest of nine minutes is for a part that hangs
KEPT = 0.75  # of what the parts behind one should take, whatever that one needs
STOPPED = "stopped from outside"
KILLED = 5.0  # seconds until a part that was killed is gone
MINIATURE = 300.0  # for each, on a CPU that may be busy with other things


def run_part(name: str, device: str, seconds: float, out: Path, most: float | None = None) -> Result:
    """One part, which aims at `seconds` and is killed after `most`, and all that it started with it.

    So it is where this process is killed. Its output goes to `out`/NAME.log.
    """
    most = most or seconds
    findings, log = out / f"{name}.jsonl", out / f"{name}.log"
    findings.write_text("")
    begun = time.monotonic()
    command = [sys.executable, "-m", "refimpl.gpu.part", name, device, str(seconds), str(begun + most), str(findings)]
    with log.open("w") as output, held() as life:
        process = None
        try:
            process = subprocess.Popen(
                command, stdin=life, stdout=output, stderr=subprocess.STDOUT, env=settled(out), start_new_session=True
            )
            print(f"{name} ...", flush=True)
            code = process.wait(most)
            ended = "" if code == 0 else f"exit code {code}" if code > 0 else signal_name(-code)
        except subprocess.TimeoutExpired:
            ended = f"not done after {most:.0f} s"
        except KeyboardInterrupt:
            ended = STOPPED
        finally:
            if process is not None:
                with suppress(ProcessLookupError):  # nobody is left: what a part that ended has started may live on
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # in a driver that does not answer nothing can be killed
                    process.wait(KILLED)
    lines = [json.loads(line) for line in findings.read_text().splitlines(keepends=True) if line.endswith("\n")]
    ended = ended or ("" if lines else "it found nothing")
    tail = log.read_text(errors="replace").splitlines()[-40:] if ended else []
    return Result(name, round(time.monotonic() - begun, 1), ended, lines, tail)


def settled(out: Path) -> dict[str, str]:
    """A part's environment."""
    # NVIDIA's containers ask for TF32; then fp32 is not near a CPU's.
    said = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "PYTHONUNBUFFERED": "1"}
    said["PYTHONFAULTHANDLER"] = "1"  # a crash says where
    compiled = str((out / "compiled").absolute())  # torch imports no optimizer where it cannot make its folder
    said |= {"TRITON_CACHE_DIR": compiled, "TORCHINDUCTOR_CACHE_DIR": compiled}
    if folder := libcuda.missed():
        said[libcuda.VARIABLE] = folder
    return os.environ | said


def check(device: str, out: Path, parts: Sequence[str], total: float = TOTAL, begun: float | None = None) -> Report:
    """Run these parts; the report lies in `out` from the first moment on. `total` counts from `begun`, or from now."""
    deadline = (time.monotonic() if begun is None else begun) + total
    out.mkdir(parents=True, exist_ok=True)
    report = Report(device)
    written(report, out)
    for place, name in enumerate(parts, 1):
        left, later = deadline - time.monotonic(), sum(PARTS[behind] for behind in parts[place:])
        try:
            if device != "cuda":
                result = run_part(name, device, MINIATURE, out)
            elif left < 5:
                result = Result(name, 0.0, "no time was left", [], [])
            else:
                aim = PARTS[name] * min(1.0, left / (PARTS[name] + later))
                result = run_part(name, device, aim, out, max(aim, left - KEPT * later))
        except OSError as error:  # no disk or no process to be had
            result = Result(name, 0.0, str(error), [], [])
        report.results.append(result)
        written(report, out)
        print(f"{name}: {result.verdict}, {result.seconds} s", flush=True)
        if result.ended == STOPPED:
            break
    return report


def written(report: Report, out: Path) -> None:
    """Where it cannot be, as on a disk that is full, it is printed, and the next part begins all the same."""
    try:
        report.write(out)
    except OSError as error:
        print(f"gpu-check: no report in {out}: {error}. It is:\n{report.markdown()}", flush=True)


def folder_of(parts: Sequence[str]) -> Path:
    """Where their report goes: that of some parts does not take the place of the whole one."""
    return Path("out/gpu" if list(parts) == list(PARTS) else f"out/gpu-{'-'.join(parts)}")


def main(arguments: Sequence[str] | None = None, begun: float | None = None) -> int:
    """0: every part passed. 1: not so. 2: there is no GPU, no folder to write to, or a wrong argument.

    begun: when the program did, by time.monotonic().
    """
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: every part in miniature")
    parser.add_argument("--out", type=Path, help="folder of the report; out/gpu, of some parts alone out/gpu-NAME")
    parser.add_argument("--part", choices=list(PARTS), nargs="+", default=list(PARTS), help="these parts alone")
    options: Any = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu-check: torch finds no GPU here, so nothing was checked: {why_none()}. ARGS='--device cpu' runs every "
            "part in miniature, which tests the program and shows nothing about GPUs.",
            file=sys.stderr,
        )
        return 2
    out = options.out or folder_of(options.part)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"gpu-check: {out}: {error.strerror}; name another folder: ARGS='--out /tmp/gpu'", file=sys.stderr)
        return 2
    for end in (signal.SIGTERM, signal.SIGHUP):  # whoever ends this, or closes its terminal, finds a report too
        signal.signal(end, signal.default_int_handler)
    report = check(options.device, out, options.part, begun=begun)
    print(f"{out / 'report.md'}: {'passed' if report.passed else 'FAILED'}")
    return 0 if report.passed else 1
