"""Every program has a seed of its own.

task: dropout_kernel
says: elements are kept whose number, tl.rand(seed, i), is below p
"""

import triton
import triton.language as tl


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    number = tl.rand(seed + tl.program_id(0), tl.arange(0, BLOCK))
    tl.store(out_ptr + i, tl.where(number >= p, x / (1 - p), 0.0), mask=i < n)
