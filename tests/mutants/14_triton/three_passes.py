"""Maximum, sum and result each load the row.

task: softmax_kernel
says: x_ptr is loaded 3 times over
"""

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    mask = col < cols
    at = x_ptr + row * x_stride + col
    top = tl.max(tl.load(at, mask=mask, other=-float("inf")).to(tl.float32), axis=0)
    total = tl.sum(tl.exp(tl.load(at, mask=mask, other=-float("inf")).to(tl.float32) - top), axis=0)
    e = tl.exp(tl.load(at, mask=mask, other=-float("inf")).to(tl.float32) - top)
    tl.store(out_ptr + row * out_stride + col, e / total, mask=mask)
