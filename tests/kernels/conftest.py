"""Kernels are interpreted here, on the CPU; where there is a GPU they are compiled and the same tests run on it.

@triton.jit reads TRITON_INTERPRET when a kernel is defined, so every kernel is defined while it is set. Nothing else in
this process is changed: what trains on a CPU takes torch's operators and imports no kernel (test_language.py).
"""

import os
import sys

import pytest
import torch

INTERPRET = not torch.cuda.is_available()
if INTERPRET:
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        raise pytest.UsageError(
            "a test module collected before tests/kernels has imported triton (torch.utils.flop_counter does), whose "
            "own functions are compiled ones then: import it inside the test"
        )
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
from refimpl.kernels.case import cases  # noqa: E402
from refimpl.kernels.language import INSTALLED, INTERPRETED  # noqa: E402

list(cases())  # imports every kernel
if INTERPRET:
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/kernels" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("kernels"))
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="triton is not installed"))


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _what_the_first_interpreted_launch_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the variable once more."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the CPU, interpreted, or the GPU."""
    assert INTERPRETED or torch.cuda.is_available(), "refimpl.kernels was imported before this conftest"
    return torch.device("cpu" if INTERPRETED else "cuda")
