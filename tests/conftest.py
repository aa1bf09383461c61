"""Shared by all tests: helpers beside a test file can be imported from it, also in the ranks it starts."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)  # as in the ranks: a matmul split over threads may add in another order

for folder in sorted({p.parent for p in Path(__file__).parent.rglob("*.py")}):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
