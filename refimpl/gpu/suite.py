"""Every test that needs a GPU: those marked `gpu`, in the files that have one (others may import what is not here).

The kernels are compiled first, on many cores: one after the other, as the tests need them, that would take minutes.
Triton keeps them on disk, so the next part finds them too. Each test is a finding of its own, told as soon as it ends.
"""

import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import torch

from refimpl.gpu.part import Finding
from refimpl.kernels.case import cases
from refimpl.kernels.compiled import kernels_of
from refimpl.kernels.language import INSTALLED

ROOT = Path(__file__).parents[2]
COMPILERS = 16  # at most: each imports torch and all kernels, and a container may have fewer cores than it sees
MARK = "mark." + "gpu"  # this file has none
ENDED = re.compile(r"(\S+::.*) (PASSED|FAILED|SKIPPED|ERROR)\b")


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    if device.type == "cuda" and INSTALLED:
        major, minor = torch.cuda.get_device_capability(device)
        spoilt = on_all_cores(partial(compiled, capability=10 * major + minor), len(list(cases())))
        yield Finding("kernels that do not compile", spoilt or "none", not spoilt)
    if not importlib.util.find_spec("pytest"):
        again = f"make gpu-check PYTHON={sys.executable} ARGS='--part suite'"
        remedy = f"{sys.executable} -m pip install pytest, then {again}"
        yield Finding("tests marked gpu", f"none ran, since pytest is not installed: {remedy}")
        return
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in file.read_text()]
    # Verbose, against the -q of our settings; a newer library's warning is not what is asked.
    choice = [*files, "-m", "gpu", "-vv", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    if device.type == "cpu":
        choice.append("--collect-only")
    command = [sys.executable, "-m", "pytest", *choice]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # none of what happens to be installed there
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
            if ended := ENDED.match(line):
                yield Finding(ended[1], ended[2].lower(), {"PASSED": True, "SKIPPED": None}.get(ended[2], False))
    yield Finding("tests marked gpu", last, process.wait() == 0)


def on_all_cores(compile_it: Callable[[int], str], count: int) -> list[str]:
    """What `compile_it` says of the numbers below `count`, without those of which there is nothing to say."""
    cores = min(count, COMPILERS, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        try:
            return [text for text in pool.map(compile_it, range(count)) if text]
        except BrokenProcessPool:
            return ["a compiler's process crashed, so not all were tried: the tests below compile what is missing"]


def compiled(number: int, capability: int) -> str:
    """What is wrong with this case's kernels, "" if they compile for a GPU of this capability, as 90."""
    case = list(cases())[number]
    try:
        kernels_of(case, capability)
    except Exception as error:  # whatever the compiler raises is what the report should say
        return f"{case.name}: {type(error).__name__}: {error}"[:500]
    return ""
