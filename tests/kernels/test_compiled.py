"""Every kernel compiles for an H100, at real sizes: no register is spilled, and it fits a multiprocessor."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from refimpl.kernels.case import cases
from refimpl.kernels.compiled import REGISTER_FILE, SHARED_LIMIT
from refimpl.kernels.language import SHARED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    return compile_them()


def compile_them(*arguments: str) -> list[dict[str, Any]]:
    """In a process of its own, which does not interpret. Triton keeps what was compiled before."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"refimpl-triton-{os.getuid()}")
    command = [sys.executable, "-m", "refimpl.kernels.compiled", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", sorted({case.name for case in cases()}))
def test_no_register_is_spilled(compiled: list[dict[str, Any]], name: str) -> None:
    kernels = [found for found in compiled if found["case"] == name]
    assert kernels, "no kernel was launched: the case took torch's operator"
    for found in kernels:
        assert found["stack"] == 0, found  # spilled registers live there
        assert found["shared"] <= SHARED_LIMIT, found
        assert found["registers"] * found["warps"] * 32 <= REGISTER_FILE, found
        assert found["programs"] >= 1, found


def test_loads_in_flight_fit_a_smaller_card() -> None:
    """An RTX 4090: three rows of 8192 and their gradients took more than its 99 KB."""
    found = compile_them("rms_norm fp32 16384x8192", "89")
    assert found
    assert all(kernel["shared"] <= SHARED[89] * 1024 for kernel in found), found
