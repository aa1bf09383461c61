"""What a kernel takes of an H100, without one: Triton's compiler and ptxas need no GPU.

    python -m refimpl.kernels.compiled [WORD [CAPABILITY]]    # a JSON line a kernel: registers, shared memory, spills

A case runs on "meta" tensors, forward and backward, through the very code that runs on a GPU; where a kernel would be
launched it is compiled, so that argument types, alignment and constants are those of a real call. Spilled registers
live on the stack: no stack, no spills. `cuobjdump`, which comes with triton, reads both from the cubin.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from refimpl.kernels.case import Case, cases, forward_and_backward
from refimpl.kernels.language import INTERPRETED, REHEARSING, triton

SHARED_LIMIT = 227 * 1024  # bytes a program may use on sm_90
REGISTER_FILE = 64 * 1024  # registers of one multiprocessor, for all programs on it


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled: registers and stack bytes of a thread, shared bytes and warps of a program."""

    case: str
    kernel: str
    registers: int
    stack: int
    shared: int
    warps: int

    @property
    def programs(self) -> int:
        """How many programs fit on one multiprocessor of an H100 at a time."""
        by_registers = REGISTER_FILE // (-(-self.registers // 8) * 8 * 32 * self.warps)
        return min(by_registers, 64 // self.warps, 228 * 1024 // (self.shared + 1024), 32)


class NoDriver:
    """Stands where Triton's CUDA driver would: it names the target, and there is nothing else it can do."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def rehearse(capability: int = 90) -> Iterator[list[Any]]:
    """Within, kernels launched on "meta" tensors are compiled for `capability` and listed, and none runs."""
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 is set: there is nothing to compile; unset it before refimpl.kernels")
    found: list[Any] = []
    driver, function = triton.runtime.driver, triton.runtime.jit.JITFunction
    run = function.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(kernel)
        return kernel

    active, token = driver._active, REHEARSING.set(capability)
    driver.set_active(NoDriver(capability))
    function.run = compile_only
    try:
        yield found
    finally:
        function.run = run
        driver._active = active
        REHEARSING.reset(token)


def kernels_of(case: Case, capability: int = 90) -> list[Any]:
    """Every kernel that this call launches, forward and backward, each form of it once; Triton keeps them on disk."""
    with rehearse(capability) as found:
        forward_and_backward(case.call, case.inputs(torch.device("meta")))
    return list({kernel.hash: kernel for kernel in found}.values())


def resources(case: str, kernel: Any) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", text.stdout)
    metadata = kernel.metadata
    return Compiled(case, metadata.name, int(usage[0]), int(usage[1]), metadata.shared, metadata.num_warps)


def main(word: str = "", capability: str = "90") -> None:
    for case in cases():
        if word in case.name:
            for kernel in kernels_of(case, int(capability)):
                found = resources(case.name, kernel)
                also = {"programs": found.programs} if capability == "90" else {}  # others have other limits
                print(json.dumps({**asdict(found), **also}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
