"""The accumulator has c's dtype, which may be fp16.

task: matmul_kernel
says: the sum over K is kept in c's fp16
"""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_col, b_row, b_col, c_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    j = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, BN), c_ptr.dtype.element_ty)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        down, across = k[:, None], k[None, :]
        a = tl.load(a_ptr + i * a_row + across * a_col, mask=(i < M) & (across < K), other=0.0)
        b = tl.load(b_ptr + down * b_row + j * b_col, mask=(down < K) & (j < N), other=0.0)
        total += tl.dot(a, b, input_precision="ieee").to(total.dtype)
    tl.store(c_ptr + i * c_row + j, total, mask=(i < M) & (j < N))
