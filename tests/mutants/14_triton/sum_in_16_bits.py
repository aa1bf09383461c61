"""The running sum has the dtype of x.

task: column_sum_kernel
says: the sum is kept in 16 bits
"""

import triton
import triton.language as tl


@triton.jit
def column_sum_kernel(x_ptr, partial_ptr, rows, cols, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
    for row in range(first, rows, tl.num_programs(0)):
        total += tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0)
    tl.store(partial_ptr + first * cols + col, total, mask=col < cols)
