"""The sum of squares, in the place of their mean.

task: rms_norm_kernel
says: not divided by cols
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, cols, eps, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    mask = col < cols
    at = row * cols + col
    s = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    s += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, s, mask=mask)
    scale = tl.rsqrt(tl.sum(s * s, axis=0) + eps)
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, s * scale * weight, mask=mask)
