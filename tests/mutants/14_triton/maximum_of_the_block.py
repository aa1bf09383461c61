"""Each block is relative to its own maximum, which may be far below those before it.

task: logsumexp_kernel
says: infinite where a block's maximum is below those before it
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
        new = tl.max(x, axis=0)
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), axis=0)
        top = new
    tl.store(out_ptr + row, top + tl.log(total))
