"""Shared by all tests: helpers beside a test file can be imported from it, also in the ranks it starts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from refimpl.ranks.server import PRELOAD

torch.set_num_threads(1)  # as in the ranks: a matmul split over threads may add in another order
PRELOAD += ["refimpl.deepspeed", "refimpl.grading.rank"]  # what most ranks of these tests would import, each by itself

for folder in sorted({p.parent for p in Path(__file__).parent.rglob("*.py")}):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture(scope="session", autouse=True)
def _ranks_that_stay() -> Iterator[None]:
    """Those of tests/worlds.py end with the session."""
    yield
    if "worlds" in sys.modules:
        sys.modules["worlds"].worlds().stop()
