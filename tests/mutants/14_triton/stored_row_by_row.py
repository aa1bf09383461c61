"""The sum is kept in memory, and loaded for every row.

task: column_sum_kernel
says: partial_ptr is loaded
"""

import triton
import triton.language as tl


@triton.jit
def column_sum_kernel(x_ptr, partial_ptr, rows, cols, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = partial_ptr + first * cols + col
    tl.store(at, tl.zeros((BLOCK,), tl.float32), mask=col < cols)
    for row in range(first, rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
        tl.store(at, tl.load(at, mask=col < cols, other=0.0) + x, mask=col < cols)
