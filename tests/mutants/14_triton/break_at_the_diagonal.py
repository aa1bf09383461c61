"""The loop over keys is left by `break`, which the interpreter takes and the compiler does not.

task: flash_kernel
says: Triton's compiler knows no `break`
"""

import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, T, group, scale, q_head, q_token, kv_head, kv_token,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * BM, tl.program_id(1)
    query, feature = first + tl.arange(0, BM), tl.arange(0, D)[None, :]
    inside = query[:, None] < T
    q = tl.load(q_ptr + head * q_head + query[:, None] * q_token + feature, mask=inside, other=0.0)
    kv = head // group * kv_head + feature
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, D), tl.float32)
    for start in range(0, T, BN):
        if start > first + BM - 1:
            break
        key = start + tl.arange(0, BN)
        at = kv + key[:, None] * kv_token
        k = tl.load(k_ptr + at, mask=key[:, None] < T, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BM, BN]
        scores = tl.where(query[:, None] >= key[None, :], scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - new[:, None])
        shrink = tl.exp(top - new)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + at, mask=key[:, None] < T, other=0.0)
        result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
        top = new
    out = (head * T + query[:, None]) * D + feature
    tl.store(out_ptr + out, result / total[:, None], mask=inside)
    tl.store(lse_ptr + head * T + query, top + tl.log(total), mask=query < T)
