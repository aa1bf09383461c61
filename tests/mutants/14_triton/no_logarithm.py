"""The sum itself is added to the maximum.

task: logsumexp_kernel
says: the logarithm of the sum is missing
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
        new = tl.maximum(top, tl.max(x, axis=0))
        base = tl.where(new == -float("inf"), 0.0, new)  # -inf less -inf would be NaN
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), axis=0)
        top = new
    tl.store(out_ptr + row, top + total)
