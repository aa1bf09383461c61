"""A tile's columns are loaded one at a time.

task: transpose_kernel
says: by columns each element costs a sector
"""

import triton
import triton.language as tl


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for i in range(BLOCK):
        c = tl.program_id(1) * BLOCK + i
        x = tl.load(x_ptr + r * x_stride + c, mask=(r < rows) & (c < cols))
        tl.store(out_ptr + c * out_stride + r, x, mask=(r < rows) & (c < cols))
