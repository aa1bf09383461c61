"""`refimpl bench kernels` on a GPU, without torch.compile, which takes minutes: each kernel beside eager torch.

A result of ours may be off from eager's by what both may be off from the truth. So kernels are compared also where
pytest, which the tests against float64 need, is not installed.
"""

import time
from collections.abc import Iterator

import torch

from refimpl.bench.kernels import find_limits, heat
from refimpl.gpu.part import Finding
from refimpl.kernels.case import cases


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    deadline = time.monotonic() + 0.85 * seconds
    small = device.type == "cpu"
    limits, _ = find_limits(device)
    yield Finding("limits of this machine, TB/s and TFLOP/s", [limits.bytes_s / 1e12, limits.flops_s / 1e12])
    left = list(cases(small))[: 1 if small else None]
    while left and time.monotonic() < deadline:
        case = left.pop(0)
        try:
            rows = list(heat(case, device, limits, deadline=0.0))
        except torch.OutOfMemoryError:
            yield Finding(case.name, "beside eager torch it does not fit into this GPU's memory")
            continue
        except Exception as error:  # one that fails must not hide the others
            yield Finding(case.name, f"{type(error).__name__}: {error}", False)
            continue
        for row in rows:
            if row.ms is not None:
                rate = {"TFLOP/s": row.tflop_s} if row.tflop_s else {"TB/s": row.tb_s}
                found = {"ms": row.ms, **rate, "of the limit": row.of_limit, "of eager's time": row.beside_eager}
                found["off"] = row.off
                agrees = None if row.way != "ours" or row.off is None else row.off <= 2 * case.bound
                yield Finding(f"{case.name}, {row.step}, {row.way}", found, agrees)
    if left:
        yield Finding("no time was left for", [case.name for case in left])
