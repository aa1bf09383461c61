"""Columns are not masked.

task: transpose_kernel
says: no element of it
"""

import triton
import triton.language as tl


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = r < rows
    x = tl.load(x_ptr + r * x_stride + c, mask=mask)  # [BLOCK, BLOCK]
    tl.store(out_ptr + c * out_stride + r, x, mask=mask)
