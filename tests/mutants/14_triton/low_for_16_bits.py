"""The maximum so far begins where fp16 ends.

task: logsumexp_kernel
says: the maximum so far begins at -inf
"""

import triton
import triton.language as tl


@triton.jit
def logsumexp_kernel(x_ptr, out_ptr, cols, x_stride, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    top = -60000.0
    total = 0.0
    for b in range(0, cols, BLOCK):
        c = b + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + r * x_stride + c, mask=c < cols, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), 0)
        top = new
    tl.store(out_ptr + r, top + tl.log(total))
