"""Chapter 14: kernels in Triton, which move each byte once.

Every task is a kernel, and the grader launches it, in Triton's interpreter: no GPU is needed.
It compares the results with float64, and counts what the programs load, store and multiply.
BLOCK, BM, BN, BK, GROUP and D are powers of two known when a kernel is compiled; all other
numbers come at run time, and none of them need be a multiple of a block. Pointers are to the
first element; strides are in elements. Compute in fp32, whatever the tensors' dtype: 16-bit
values become fp32 where they are loaded, and `tl.store` rounds to the dtype of the memory.
Nothing outside of a tensor's elements may be loaded or stored, not even where another tensor's
memory lies.

To try a kernel by hand: TRITON_INTERPRET=1 python, and then launch it on CPU tensors as
`kernel[grid](...)`.
"""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(
    gate_ptr, up_ptr, out_ptr, cols, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up, where silu(x) = x / (1 + exp(-x)); all three [rows, cols], fp32 or
    fp16.

    Grid (rows, cdiv(cols, BLOCK)): program (r, b) has BLOCK columns of row r. Rows lie a stride
    apart, and a stride may be more than cols: gate and up are often two halves of one matrix.
    Each input is loaded once, out is stored once.
    """
    raise NotImplementedError("swiglu_kernel")


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    """out[c, r] = x[r, c]: x [rows, cols] with rows x_stride apart, out [cols, rows] with rows
    out_stride apart.

    Grid (cdiv(rows, BLOCK), cdiv(cols, BLOCK)). Memory comes in sectors of 32 bytes, so a load
    should ask for runs of neighbours: with BLOCK = 16 and fp32, neither a load nor a store may
    touch more sectors than its elements fill.
    """
    raise NotImplementedError("transpose_kernel")


@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    """Softmax of each row of x [rows, cols], fp32 or fp16, into out of the same shape and
    dtype.

    Grid (rows,). cols is at most BLOCK: a program holds its whole row, loads it once and stores
    it once. Some elements may be -inf (their result is 0), others so large that exp of them
    overflows.
    """
    raise NotImplementedError("softmax_kernel")


@triton.jit
def logsumexp_kernel(x_ptr, out_ptr, cols, x_stride, BLOCK: tl.constexpr):
    """out[r] = log(sum over c of exp(x[r, c])), fp32 [rows]; x [rows, cols], fp32 or fp16.

    Grid (rows,). A row may be longer than BLOCK, and is loaded once all the same, BLOCK
    elements at a time: keep the maximum so far, and the sum of exp(x - maximum so far), which
    must be rescaled when the maximum grows. Elements may be -inf, a whole block of them too;
    but not a whole row.
    """
    raise NotImplementedError("logsumexp_kernel")


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, cols, eps, BLOCK: tl.constexpr):
    """Residual addition and RMSNorm in one: s = x + residual, out = s / sqrt(mean(s^2) + eps) *
    weight.

    x, residual, out [rows, cols], contiguous, fp32 or fp16; weight [cols]. s is stored over
    residual: the next layer adds to it. Grid (rows,), cols is at most BLOCK. Loaded are x,
    residual and weight, each once a program; stored are residual and out, each once. (As two
    kernels it would be one load of s more.)
    """
    raise NotImplementedError("rms_norm_kernel")


@triton.jit
def cross_entropy_kernel(
    logits_ptr, target_ptr, loss_ptr, cols, stride, ignore_index, scale, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cross-entropy of each row, and its gradient in the place of the logits, before any
    backward is called.

    logits [rows, cols], rows `stride` apart, fp32 or fp16; target [rows] int64; loss [rows]
    fp32. Grid (rows,).

        loss = log(sum of exp(logits)) - logits[target]
        gradient = scale * (softmax(logits) - [c is the target])

    A row may be longer than BLOCK. Its logits are loaded twice (once for the sum, once for the
    gradient) and stored once; one element more may be loaded, that of the target. A row whose
    target is ignore_index has loss 0 and gradient 0, and none of its logits is loaded: they may
    be NaN.
    """
    raise NotImplementedError("cross_entropy_kernel")


@triton.jit
def column_sum_kernel(x_ptr, partial_ptr, rows, cols, BLOCK: tl.constexpr):
    """The first half of a sum over rows, as in the gradient of a bias: x [rows, cols] ->
    partial [P, cols], fp32.

    Grid (P, cdiv(cols, BLOCK)): program (p, b) adds up rows p, p + P, p + 2 P, ... of its BLOCK
    columns, and stores the sum in row p of partial; P is tl.num_programs(0), and may be more
    than rows. x is contiguous, fp32 or fp16; it is loaded once, and partial is stored once and
    never loaded. No atomics: the same bits in every run.
    """
    raise NotImplementedError("column_sum_kernel")


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    """out[i] = x[i] / (1 - p) where tl.rand(seed, i) >= p, else 0; x and out [n], fp32 or fp16.

    Grid (cdiv(n, BLOCK),). No mask is stored anywhere: backward is this kernel once more, on
    the gradient, with the same seed. So what is dropped depends on seed and i alone, not on
    BLOCK. p is at least 0 and below 1.
    """
    raise NotImplementedError("dropout_kernel")


@triton.jit
def grouped_tile(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Which tile program `pid` computes: (m, n), so that programs that run at once share rows
    of a and columns of b.

    The tiles of the result, tiles_m x tiles_n, are taken in bands of GROUP rows of tiles, and
    within a band column by column. The last band has fewer rows if GROUP does not divide
    tiles_m. With 3 x 2 tiles and GROUP = 2, pid 0, 1, ... have (0, 0), (1, 0), (0, 1), (1, 1),
    (2, 0), (2, 1). Called by a kernel.
    """
    raise NotImplementedError("grouped_tile")


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_col, b_row, b_col, c_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c = a b: a [M, K], b [K, N], fp32 or fp16, any strides (a_row is from one row to the
    next); c [M, N], fp32 or fp16.

    Grid (cdiv(M, BM), cdiv(N, BN)): program (m, n) makes one tile of c, BK of K at a time, by
    tl.dot, and sums in fp32 also where a and b are fp16. All of a is loaded cdiv(N, BN) times,
    all of b cdiv(M, BM) times, c is stored once. fp32 is multiplied as fp32, not as tf32:
    input_precision="ieee".
    """
    raise NotImplementedError("matmul_kernel")


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, T, group, scale, q_head, q_token, kv_head, kv_token,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Causal attention without its T x T scores: out = softmax(scale q k^T, keys up to the
    query's own) v.

    q [heads, T, D] with strides q_head, q_token and 1; k and v [heads / group, T, D], both with
    strides kv_head, kv_token and 1, where query head h reads key head h // group; out
    [heads, T, D] and lse [heads, T] (fp32, the log of the sum of exp(scores), for backward),
    contiguous. q, k, v, out are fp32 or fp16.

    Grid (cdiv(T, BM), heads): a program has BM queries, and goes through keys and values BN at
    a time with a running maximum, sum and result, as in logsumexp_kernel. q is loaded once; a
    block of keys and values once by each program that needs it, and not at all if all its keys
    come after all its queries. Per block two products: 4 BM BN D operations. No block is larger
    than BM or BN by BM, BN or D. Sums are fp32; input_precision="ieee".
    """
    raise NotImplementedError("flash_kernel")
