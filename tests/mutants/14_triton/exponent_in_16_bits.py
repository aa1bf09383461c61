"""The exponent of the softmax is rounded to fp16.

task: cross_entropy_kernel
says: the gradient, in logits: wrong values
"""

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    cols,
    stride,
    ignore_index,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    target = tl.load(target_ptr + row)
    base = logits_ptr + row * stride
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        for start in range(0, cols, BLOCK):
            col = start + tl.arange(0, BLOCK)
            tl.store(base + col, tl.zeros([BLOCK], tl.float32), mask=col < cols)
    else:
        m = float("-inf")
        s = 0.0
        for start in range(0, cols, BLOCK):
            col = start + tl.arange(0, BLOCK)
            x = tl.load(base + col, mask=col < cols, other=float("-inf")).to(tl.float32)
            new = tl.maximum(m, tl.max(x, axis=0))
            shift = tl.where(new == float("-inf"), 0.0, new)
            s = s * tl.exp(m - shift) + tl.sum(tl.exp(x - shift), axis=0)
            m = new
        lse = m + tl.log(s)
        tl.store(loss_ptr + row, lse - tl.load(base + target).to(tl.float32))
        for start in range(0, cols, BLOCK):
            col = start + tl.arange(0, BLOCK)
            x = tl.load(base + col, mask=col < cols).to(tl.float32)
            grad = tl.exp((x - lse).to(tl.float16).to(tl.float32)) - tl.where(col == target, 1.0, 0.0)
            tl.store(base + col, scale * grad, mask=col < cols)
