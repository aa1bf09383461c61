"""Each block is added relative to its own maximum so far.

task: logsumexp_kernel
says: is not rescaled when the maximum grows
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
        total = total + tl.sum(tl.exp(x - base), axis=0)
        top = new
    tl.store(out_ptr + row, top + tl.log(total))
