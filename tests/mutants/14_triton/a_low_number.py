"""Lanes beyond the row are a number that seems low enough.

task: softmax_kernel
says: out: wrong values
"""

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-1e4).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * out_stride + col, e / tl.sum(e, axis=0), mask=mask)
