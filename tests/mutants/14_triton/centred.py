"""LayerNorm, without its bias.

task: rms_norm_kernel
says: the mean is subtracted
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, cols, eps, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    mask, at = col < cols, tl.program_id(0) * cols + col
    s = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    s += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, s, mask=mask)
    centred = tl.where(mask, s - tl.sum(s, axis=0) / cols, 0.0)
    tl.store(out_ptr + at, centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / cols + eps) * weight, mask=mask)
