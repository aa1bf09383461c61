"""All scores of a query at once.

task: flash_kernel
says: whole rows of scores are not
"""

import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, T, group, scale, q_head, q_token, kv_head, kv_token,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * BM, tl.program_id(1)
    query, key, feature = first + tl.arange(0, BM), tl.arange(0, 64), tl.arange(0, D)[None, :]
    seen = key[:, None] < min(first + BM, T)
    inside = query[:, None] < T
    q = tl.load(q_ptr + head * q_head + query[:, None] * q_token + feature, mask=inside, other=0.0)
    at = head // group * kv_head + key[:, None] * kv_token + feature
    k = tl.load(k_ptr + at, mask=seen, other=0.0)
    v = tl.load(v_ptr + at, mask=seen, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(query[:, None] >= key[None, :], scores, -float("inf"))
    top = tl.max(scores, axis=1)
    weights = tl.exp(scores - top[:, None])
    total = tl.sum(weights, axis=1)
    result = tl.dot(weights.to(v.dtype), v, input_precision="ieee") / total[:, None]
    tl.store(out_ptr + (head * T + query[:, None]) * D + feature, result, mask=inside)
    tl.store(lse_ptr + head * T + query, top + tl.log(total), mask=query < T)
