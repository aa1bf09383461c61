"""What the compiler makes of one kernel for an H100, in several configurations, without a GPU.

    look(path, "matmul_kernel", {"a_ptr": "*fp16", ...}, {"BM": 128, ...}, [{"num_warps": 4}, {"num_warps": 8}])

compiles in a process of its own, in which kernels are not interpreted, about a second a configuration. Registers and
the stack are what `cuobjdump` reads from the binary; instructions are counted in PTX, the assembler's input, where a
name says what is used: `wgmma` and `mma` are tensor cores, `cp.async` copies ahead, from memory to shared memory while
the program computes, and a load of .v4.b32 moves 16 bytes a thread.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from refimpl.kernels.compiled import resources

INSTRUCTIONS = {
    "tensor core": r"\b(?:wgmma\.mma_async|mma\.sync)",
    "copies ahead": r"\bcp\.async\.c[ag]",
    "16-byte loads": r"\bld\.global\S*\.v4\.b32",
    "narrower loads": r"\bld\.global(?!\S*\.v4\.b32)",
}


def look(
    path: Path | str,
    kernel: str,
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    options: Sequence[Mapping[str, int]],
    multiples: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """For each of `options` (num_warps, num_stages, and constants that it changes) what one program takes and uses.

    signature: each argument that is no constant -> its type, such as "*fp16", "i32", "fp32". multiples: arguments that
    are multiples of 16, pointers in bytes; a launch finds that out by itself. RuntimeError with the compiler's words if
    it cannot compile.
    """
    request = [str(path), kernel, dict(signature), dict(constants), [dict(o) for o in options], list(multiples)]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "refimpl.kernels.look"]
    done = subprocess.run(command, input=json.dumps(request), env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{kernel} cannot be compiled:\n{done.stderr.strip()[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def compiled(
    path: str,
    name: str,
    signature: dict[str, str],
    constants: dict[str, int],
    options: dict[str, int],
    multiples: list[str],
) -> dict[str, Any]:
    """One configuration."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.util.spec_from_file_location("looked_at", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, name)
    fixed = constants | {k: v for k, v in options.items() if not k.startswith("num_")}
    places = {n: i for i, n in enumerate(kernel.arg_names)}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n in multiples}
    source = ASTSource(kernel, {**signature, **dict.fromkeys(fixed, "constexpr")}, fixed, aligned)
    launch = {k: v for k, v in options.items() if k.startswith("num_")}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    taken = resources(name, made)
    counts = {what: len(re.findall(pattern, made.asm["ptx"])) for what, pattern in INSTRUCTIONS.items()}
    return {**options, **asdict(taken), "programs": taken.programs, **counts}


if __name__ == "__main__":
    where, which, types, fixed_, several, known = json.load(sys.stdin)
    json.dump([compiled(where, which, types, fixed_, each, known) for each in several], sys.stdout)
