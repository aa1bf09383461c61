"""silu(gate) is rounded to the dtype before it is multiplied.

task: swiglu_kernel
says: out: wrong values
"""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    cols,
    gate_stride,
    up_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    g = tl.load(gate_ptr + row * gate_stride + col, mask=mask).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + col, mask=mask)
    tl.store(out_ptr + row * out_stride + col, (g / (1 + tl.exp(-g))).to(u.dtype) * u, mask=mask)
