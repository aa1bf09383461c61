"""exp2 is taken for exp.

task: softmax_kernel
says: powers of 2
"""

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(tl.float32)
    powers = tl.exp2(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * out_stride + col, powers / tl.sum(powers, axis=0), mask=col < cols)
