"""Every program adds its sum to row 0.

task: column_sum_kernel
says: a race
"""

import triton
import triton.language as tl


@triton.jit
def column_sum_kernel(x_ptr, partial_ptr, rows, cols, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        total += tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    old = tl.load(partial_ptr + col, mask=col < cols, other=0.0)
    tl.store(partial_ptr + col, old + total, mask=col < cols)
