"""The sum of the blocks before is relative to their own maximum.

task: flash_kernel
says: out: the sum so far is not rescaled when the maximum grows
"""

import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, T, group, scale, q_head, q_token, kv_head, kv_token,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * BM, tl.program_id(1)
    rows, d = first + tl.arange(0, BM), tl.arange(0, D)
    there = (rows < T)[:, None]
    q = tl.load(q_ptr + head * q_head + rows[:, None] * q_token + d[None, :], mask=there, other=0.0).to(tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, D), tl.float32)
    for start in range(0, min(first + BM, T), BN):
        cols = start + tl.arange(0, BN)
        at = (head // group) * kv_head + cols[:, None] * kv_token + d[None, :]
        k = tl.load(k_ptr + at, mask=(cols < T)[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=(cols < T)[:, None], other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(cols[None, :] <= rows[:, None], scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - new[:, None])
        shrink = tl.exp(top - new)
        total = total + tl.sum(weights, axis=1)
        result = result * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        top = new
    out = out_ptr + (head * T + rows)[:, None] * D + d[None, :]
    tl.store(out, result / total[:, None], mask=there)
    tl.store(lse_ptr + head * T + rows, top + tl.log(total), mask=rows < T)
