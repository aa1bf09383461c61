"""Nothing says what lanes beyond the row hold, and they are in the sum: the interpreter has 0 there.

task: rms_norm_kernel
says: no `other` says what they hold
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, cols, eps, BLOCK: tl.constexpr):
    at, col = tl.program_id(0) * cols + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    mask = col < cols
    s = tl.load(x_ptr + at, mask=mask).to(tl.float32) + tl.load(residual_ptr + at, mask=mask).to(tl.float32)
    tl.store(residual_ptr + at, s, mask=mask)
    weight = tl.load(weight_ptr + col, mask=mask).to(tl.float32)
    tl.store(out_ptr + at, s * tl.rsqrt(tl.sum(s * s, axis=0) / cols + eps) * weight, mask=mask)
