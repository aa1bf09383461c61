"""Triton's own sigmoid is given fp16, and refuses it from inside.

task: swiglu_kernel
says: swiglu_kernel raised ValueError: Expected dtype
says: in swiglu_kernel
says: Make values fp32 where they are loaded
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
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask)
    tl.store(out_ptr + row * out_stride + col, gate * tl.sigmoid(gate) * up, mask=mask)
