"""Scores are rounded to the dtype of q.

task: flash_kernel
says: wrong values
"""

import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    T,
    group,
    scale,
    q_head,
    q_token,
    kv_head,
    kv_token,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    h = tl.program_id(1)
    start = tl.program_id(0) * BM
    m = start + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + h * q_head + m[:, None] * q_token + d[None], mask=m[:, None] < T, other=0.0).to(tl.float32)
    kv = h // group * kv_head
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for n0 in range(0, tl.minimum(start + BM, T), BN):
        n = n0 + tl.arange(0, BN)
        k = tl.load(k_ptr + kv + n[:, None] * kv_token + d[None], mask=n[:, None] < T, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + kv + n[:, None] * kv_token + d[None], mask=n[:, None] < T, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee").to(q_ptr.dtype.element_ty).to(tl.float32) * scale
        s = tl.where((n[None] <= m[:, None]) & (n[None] < T), s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        old = tl.exp(top - new)
        p = tl.exp(s - new[:, None])
        total = total * old + tl.sum(p, 1)
        acc = acc * old[:, None] + tl.dot(p, v, input_precision="ieee")
        top = new
    tl.store(out_ptr + h * T * D + m[:, None] * D + d[None], acc / total[:, None], mask=m[:, None] < T)
    tl.store(lse_ptr + h * T + m, top + tl.log(total), mask=m < T)
