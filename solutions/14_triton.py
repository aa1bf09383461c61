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
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask).to(tl.float32)
    tl.store(out_ptr + row * out_stride + col, gate / (1 + tl.exp(-gate)) * up, mask=mask)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    """out[c, r] = x[r, c]: x [rows, cols] with rows x_stride apart, out [cols, rows] with rows
    out_stride apart.

    Grid (cdiv(rows, BLOCK), cdiv(cols, BLOCK)). Memory comes in sectors of 32 bytes, so a load
    should ask for runs of neighbours: with BLOCK = 16 and fp32, neither a load nor a store may
    touch more sectors than its elements fill.
    """
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (r < rows) & (c < cols)
    x = tl.load(x_ptr + r * x_stride + c, mask=mask)  # [BLOCK, BLOCK]
    tl.store(out_ptr + c * out_stride + r, x, mask=mask)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    """Softmax of each row of x [rows, cols], fp32 or fp16, into out of the same shape and
    dtype.

    Grid (rows,). cols is at most BLOCK: a program holds its whole row, loads it once and stores
    it once. Some elements may be -inf (their result is 0), others so large that exp of them
    overflows.
    """
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * out_stride + col, e / tl.sum(e, axis=0), mask=mask)


@triton.jit
def logsumexp_kernel(x_ptr, out_ptr, cols, x_stride, BLOCK: tl.constexpr):
    """out[r] = log(sum over c of exp(x[r, c])), fp32 [rows]; x [rows, cols], fp32 or fp16.

    Grid (rows,). A row may be longer than BLOCK, and is loaded once all the same, BLOCK
    elements at a time: keep the maximum so far, and the sum of exp(x - maximum so far), which
    must be rescaled when the maximum grows. Elements may be -inf, a whole block of them too;
    but not a whole row.
    """
    row = tl.program_id(0)
    top, total = -float("inf"), 0.0
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(
            tl.float32
        )
        new = tl.maximum(top, tl.max(x, axis=0))
        base = tl.where(new == -float("inf"), 0.0, new)  # -inf less -inf would be NaN
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), axis=0)
        top = new
    tl.store(out_ptr + row, top + tl.log(total))


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, cols, eps, BLOCK: tl.constexpr):
    """Residual addition and RMSNorm in one: s = x + residual, out = s / sqrt(mean(s^2) + eps) *
    weight.

    x, residual, out [rows, cols], contiguous, fp32 or fp16; weight [cols]. s is stored over
    residual: the next layer adds to it. Grid (rows,), cols is at most BLOCK. Loaded are x,
    residual and weight, each once a program; stored are residual and out, each once. (As two
    kernels it would be one load of s more.)
    """
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    mask = col < cols
    at = row * cols + col
    s = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    s += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, s, mask=mask)
    scale = tl.rsqrt(tl.sum(s * s, axis=0) / cols + eps)
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, s * scale * weight, mask=mask)


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
    row = tl.program_id(0)
    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    logits_ptr += row * stride
    top, total = -float("inf"), 0.0
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + col, mask=counts & (col < cols), other=-float("inf")).to(
            tl.float32
        )
        new = tl.maximum(top, tl.max(x, axis=0))
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), axis=0)
        top = new
    wanted = tl.load(logits_ptr + target, mask=counts, other=0.0).to(tl.float32)
    lse = tl.where(counts, top + tl.log(tl.where(counts, total, 1.0)), 0.0)
    tl.store(loss_ptr + row, lse - wanted)
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + col, mask=counts & (col < cols), other=-float("inf")).to(
            tl.float32
        )
        gradient = scale * (tl.exp(x - lse) - tl.where(counts & (col == target), 1.0, 0.0))
        tl.store(logits_ptr + col, gradient, mask=col < cols)


@triton.jit
def column_sum_kernel(x_ptr, partial_ptr, rows, cols, BLOCK: tl.constexpr):
    """The first half of a sum over rows, as in the gradient of a bias: x [rows, cols] ->
    partial [P, cols], fp32.

    Grid (P, cdiv(cols, BLOCK)): program (p, b) adds up rows p, p + P, p + 2 P, ... of its BLOCK
    columns, and stores the sum in row p of partial; P is tl.num_programs(0), and may be more
    than rows. x is contiguous, fp32 or fp16; it is loaded once, and partial is stored once and
    never loaded. No atomics: the same bits in every run.
    """
    first = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        total += tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    tl.store(partial_ptr + first * cols + col, total, mask=col < cols)


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    """out[i] = x[i] / (1 - p) where tl.rand(seed, i) >= p, else 0; x and out [n], fp32 or fp16.

    Grid (cdiv(n, BLOCK),). No mask is stored anywhere: backward is this kernel once more, on
    the gradient, with the same seed. So what is dropped depends on seed and i alone, not on
    BLOCK. p is at least 0 and below 1.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, tl.where(tl.rand(seed, i) >= p, x / (1 - p), 0.0), mask=i < n)


@triton.jit
def grouped_tile(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Which tile program `pid` computes: (m, n), so that programs that run at once share rows
    of a and columns of b.

    The tiles of the result, tiles_m x tiles_n, are taken in bands of GROUP rows of tiles, and
    within a band column by column. The last band has fewer rows if GROUP does not divide
    tiles_m. With 3 x 2 tiles and GROUP = 2, pid 0, 1, ... have (0, 0), (1, 0), (0, 1), (1, 1),
    (2, 0), (2, 1). Called by a kernel.
    """
    band = pid // (GROUP * tiles_n)
    rows = min(tiles_m - band * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    return band * GROUP + inside % rows, inside // rows


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
    i = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    j = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        down, across = k[:, None], k[None, :]
        a = tl.load(a_ptr + i * a_row + across * a_col, mask=(i < M) & (across < K), other=0.0)
        b = tl.load(b_ptr + down * b_row + j * b_col, mask=(down < K) & (j < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + i * c_row + j, total, mask=(i < M) & (j < N))


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
    first, head = tl.program_id(0) * BM, tl.program_id(1)
    query, feature = first + tl.arange(0, BM), tl.arange(0, D)[None, :]
    inside = query[:, None] < T
    q = tl.load(
        q_ptr + head * q_head + query[:, None] * q_token + feature, mask=inside, other=0.0
    )
    kv = head // group * kv_head + feature
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, D), tl.float32)
    for start in range(0, min(first + BM, T), BN):
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
        result = tl.dot(
            weights.to(v.dtype), v, result * shrink[:, None], input_precision="ieee"
        )
        top = new
    out = (head * T + query[:, None]) * D + feature
    tl.store(out_ptr + out, result / total[:, None], mask=inside)
    tl.store(lse_ptr + head * T + query, top + tl.log(total), mask=query < T)


HINTS = {
    "swiglu_kernel": [
        "Two program ids: a row, and a block of columns. Which lanes of the last block are columns?",
        "col < cols is the mask of both loads and of the store. A row begins at row * its own stride.",
        "gate.to(tl.float32) before exp: in fp16 exp(12) is infinite.",
    ],
    "transpose_kernel": [
        "Load a tile of BLOCK x BLOCK at once; a tile's rows are runs of neighbours.",
        "r = ... + tl.arange(0, BLOCK)[:, None] and c = ... + tl.arange(0, BLOCK)[None, :]: addresses [BLOCK, BLOCK].",
        "The same tile, the same mask; stored at out_ptr + c * out_stride + r.",
    ],
    "softmax_kernel": [
        "Masked lanes must change neither the maximum nor the sum: which value does that for both?",
        "other=-float('inf'), then subtract the maximum: exp of the lanes beyond the row is 0.",
        "Load once into x; tl.max and tl.sum work on what the program already holds.",
    ],
    "logsumexp_kernel": [
        "If the maximum grows from m to n, every term of the sum so far is too large by the factor exp(n - m).",
        "total = total * exp(top - new) + sum(exp(x - new)); top begins at -inf and total at 0.",
        "While all was -inf, top - new is NaN: subtract tl.where(new == -inf, 0.0, new) instead of new.",
    ],
    "rms_norm_kernel": [
        "What you have just computed need not be loaded: keep s, store it, and go on with it.",
        "The mean is over cols, not over BLOCK: lanes beyond the row must be 0, and the divisor is cols.",
        "eps is added to the mean, under the root: tl.rsqrt(tl.sum(s * s, axis=0) / cols + eps).",
    ],
    "cross_entropy_kernel": [
        "Two loops: logsumexp_kernel's for the sum, then one that loads again and stores the gradient.",
        "exp(x - lse) is the softmax. Load the target's logit before the second loop overwrites it.",
        "counts = target != ignore_index goes into the masks of all loads; the store's mask is col < cols alone.",
    ],
    "column_sum_kernel": [
        "range(first, rows, tl.num_programs(0)) deals the rows out.",
        "Add up in registers, tl.zeros((BLOCK,), tl.float32), and store once behind the loop.",
    ],
    "dropout_kernel": [
        "tl.rand(seed, offsets) is a function: the same seed and offset give the same number everywhere.",
        "The offset must be the element's own number i, not its lane in the program.",
    ],
    "grouped_tile": [
        "A band has GROUP * tiles_n programs: which band is pid in, and the how-manieth of it is it?",
        "rows = min(tiles_m - band * GROUP, GROUP); down first: inside % rows, then inside // rows.",
    ],
    "matmul_kernel": [
        "Rows of a are i [BM, 1], columns of b are j [1, BN]; in each step k runs over BK.",
        "Mask both dimensions of both loads, with other=0.0: a K that is no multiple of BK adds zeros.",
        "total = tl.dot(a, b, total, input_precision='ieee') with total fp32; addresses use all four strides.",
    ],
    "flash_kernel": [
        "Begin with the loop: which keys does the last query of this program see? Those before min(first + BM, T).",
        "The result is rescaled by the same exp(top - new) as the sum, and divided by the sum once, at the end.",
        "Where key > query the score is -inf, before the maximum is taken. Key head: head // group.",
        "lse = top + log(total). tl.dot(weights.to(v.dtype), v, result * shrink[:, None]).",
    ],
}  # fmt: skip
