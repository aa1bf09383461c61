"""The first element is subtracted, in place of the maximum.

task: softmax_kernel
says: any other element may lie far below it
"""

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.sum(tl.where(col == 0, x, 0.0), axis=0))
    tl.store(out_ptr + row * out_stride + col, e / tl.sum(e, axis=0), mask=mask)
