"""As many rows for each program as all of them can have.

task: column_sum_kernel
says: the last 2 rows are left out
"""

import triton
import triton.language as tl


@triton.jit
def column_sum_kernel(x_ptr, partial_ptr, rows, cols, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    P = tl.num_programs(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(rows // P):
        total += tl.load(x_ptr + (first + i * P) * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    tl.store(partial_ptr + first * cols + col, total, mask=col < cols)
