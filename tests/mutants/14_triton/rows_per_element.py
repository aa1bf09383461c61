"""Every row of a tile loads all of b's columns anew.

task: matmul_kernel
says: b_ptr is loaded 8.5 times over
"""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_col, b_row, b_col, c_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    for row in range(BM):
        i = tl.program_id(0) * BM + row
        total = tl.zeros((BN,), tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(a_ptr + i * a_row + k * a_col, mask=(i < M) & (k < K), other=0.0).to(tl.float32)
            inside = (i < M) & (k[:, None] < K) & (j[None, :] < N)
            b = tl.load(b_ptr + k[:, None] * b_row + j[None, :] * b_col, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(a[:, None] * b, axis=0)
        tl.store(c_ptr + i * c_row + j, total, mask=(i < M) & (j < N))
