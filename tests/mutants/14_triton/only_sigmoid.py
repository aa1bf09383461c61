"""The gate is not multiplied.

task: swiglu_kernel
says: this is sigmoid(gate) * up
"""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(
    gate_ptr, up_ptr, out_ptr, cols, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask).to(tl.float32)
    tl.store(out_ptr + row * out_stride + col, 1 / (1 + tl.exp(-gate)) * up, mask=mask)
