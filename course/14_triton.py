# %% [markdown]
# # 14 · Triton: from a vector sum to flash attention
#
# A GPU computes far faster than it reads. So most operations of a model take as long as their bytes take, and a **kernel**
# (a function that runs on the GPU) is good if it moves each byte once. In this chapter you write kernels in Triton, from
# a vector sum to flash attention, and count what they move. Triton's interpreter runs them in numpy, so no GPU is needed;
# and a compiler tells, without a GPU too, what they would take of one. No time is measured here. You need chapter 00,
# and no ranks.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so it comes first
# %load_ext refimpl.notebook

# %%
from refimpl.kernels.language import INSTALLED

if not INSTALLED:
    raise SystemExit(
        "triton has wheels for Linux alone: pip install 'triton>=3.6,<3.8' there. On macOS or Windows "
        "run the course in a Linux container, in WSL, or on a hosted notebook. No GPU is needed."
    )

# %% [markdown]
# ## 1. The pain: every operation reads and writes memory
#
# torch, unless it compiles, runs one kernel an operation. Each reads its inputs from memory and writes its result back, also
# where the next one reads it again at once. Counted, for three pieces of a transformer as chapter 00's model would write them: the bytes of
# all inputs and results of every operation, beside those that must move.

# %%
import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

torch.set_num_threads(1)


class Moved(TorchDispatchMode):
    """Bytes of what operations read and write; a view moves nothing."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        if not func.is_view:
            self.total += sum(t.nbytes for t in [*read, *tree_leaves(result)])
        return result


def softmax(x):
    e = (x - x.amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


def rms_norm(x, weight):
    return x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight


def attention(q, k, v):
    return softmax(q @ k.t()) @ v


x, weight = torch.randn(512, 512), torch.randn(512)
q, k, v = (torch.randn(512, 64) for _ in range(3))
rows = {}
for function, inputs in ((softmax, [x]), (rms_norm, [x, weight]), (attention, [q, k, v])):
    with Moved() as moved:
        result = function(*inputs)
    least = sum(t.nbytes for t in inputs) + result.nbytes
    rows[function.__name__] = [f"{moved.total:,}", f"{least:,}", f"{moved.total / least:.1f}"]
pd.DataFrame.from_dict(rows, orient="index", columns=["bytes moved", "bytes needed", "times"])

# %% [markdown]
# Attention is the worst, for its scores are $T \times T$ while everything else is $T \times D$: the factor grows with $T$.
# A compiler (`torch.compile`) fuses the first two by itself. The third needs an idea.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "The scores of one head at T = 16,384, in 16 bits. How many bytes does writing them, and reading them once, move? "
    "(q, k, v and the result, with D = 128, are 16.8 million.)",
    2 * 2 * 16384**2,
    unit="bytes",
    why="2 T^2 bytes are written, as many are read: 1.07 billion, 64 times as much as all that is needed.",
)

# %% [markdown]
# ## 2. The idea: a tile, near the processor
#
# ```mermaid
# flowchart LR
#   M["memory<br/>80 GB, 3.35 TB/s"] <--> L["L2 cache<br/>50 MB"] <--> S["132 multiprocessors,<br/>each 227 KB shared memory<br/>and 256 KB registers"]
# ```
#
# (An H100 SXM; NVIDIA's data sheet and Hopper white paper.) A Triton kernel is the text of one **program**. Its values
# are not numbers but *blocks* of numbers, which live in the registers of one multiprocessor. It loads a tile, does all
# that can be done with it, and stores the result. Thousands of programs run, as many as the **grid** of the call says,
# each knowing its own number. What a kernel takes at best is the **roofline** of chapter 00:
#
# $$\text{seconds} \;\ge\; \max\left(\frac{\text{bytes}}{B},\; \frac{\text{operations}}{P}\right)
# \qquad\text{and}\qquad \text{intensity} = \frac{\text{operations}}{\text{bytes}}$$
#
# with $B$ = 3.35 TB/s and $P$ = 989 TFLOP/s for products of bf16 matrices without sparsity (the same data sheet). The
# corner is at $P / B$ = 295 operations a byte. What lies left of it waits for memory, and the only cure is fewer bytes.
#
# ## 3. Build it
#
# ### One program, one block
#
# `@triton.jit` marks a kernel. A call names its grid in square brackets, `add_kernel[(4,)](...)`: four programs, and
# `tl.program_id(0)` is a program's own number, 0 to 3. A tensor arrives as a pointer to its first element, and what is
# declared `tl.constexpr` is known when the kernel is compiled, as the sizes of blocks must be. `tl.arange` makes a block of
# indices, adding it to a pointer a block of addresses. A **mask** says which elements of a block, its **lanes**, count: the
# last block is rarely full. (`triton.cdiv(n, BLOCK)` is n / BLOCK, rounded up.)

# %%
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = i < n
    total = tl.load(x_ptr + i, mask=mask) + tl.load(y_ptr + i, mask=mask)
    tl.store(out_ptr + i, total, mask=mask)


# %% tags=["hide-input"]
predict(
    "n = 1000 numbers of fp32, BLOCK = 256. How many bytes do all programs load and store together?",
    12000,
    unit="bytes",
    why="12 bytes a number. The fourth program's last 24 lanes are masked: they ask for nothing.",
)

# %%
from refimpl.kernels.count import counted
from refimpl.notebook import show

x, y, out = torch.randn(1000), torch.randn(1000), torch.empty(1000)
with counted() as c:
    add_kernel[(triton.cdiv(1000, 256),)](x, y, out, 1000, BLOCK=256)
print("right:", torch.equal(out, x + y), "| programs:", c.programs)
print("loaded", dict(c.loaded_from), "| stored", dict(c.stored_to))

# %% [markdown]
# `counted` stands between the interpreter and the memory, and adds up the lanes that are on, argument by argument
# ([count.py](../refimpl/kernels/count.py)). These are the bytes that programs *ask for*. One addition for 12 bytes is an
# intensity of 0.08, 3,500 times left of the corner: such a kernel runs at the speed of a copy, or is badly written.
#
# ### Neighbours
#
# Asking for a byte is not the same as moving one. Memory moves **sectors** of 32 bytes. A **warp**, 32 threads that run
# in step, asks for 32 addresses at once; if they are neighbours, 128 bytes come in 4 sectors (the access is
# **coalesced**), and if they lie in a column of a matrix, in 32.


# %%
@triton.jit
def copy_kernel(x_ptr, out_ptr, stride, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK) * step
    tl.store(out_ptr + at, tl.load(x_ptr + at))


# %% tags=["hide-input"]
predict(
    "64 x 64 numbers of fp32 (16,384 bytes), copied by 64 programs, each a column. How many bytes of sectors do the loads touch?",
    64 * 64 * 32,
    unit="bytes",
    why="Each of the 4,096 numbers lies in another sector of its access: 32 bytes moved for 4 used.",
)

# %%
x, out = torch.randn(64, 64), torch.empty(64, 64)
rows = {}
for name, stride, step in (("a program copies a row", 64, 1), ("a column", 1, 64)):
    with counted(trace=True) as c:
        copy_kernel[(64,)](x, out, stride, step, BLOCK=64)
    rows[name] = [c.loaded, c.sectors()["x_ptr"], c.sectors()["x_ptr"] / c.loaded]
pd.DataFrame.from_dict(
    rows, orient="index", columns=["bytes asked for", "bytes of sectors", "times"]
)

# %% [markdown]
# (Caches soften this when the neighbours are asked for soon after; a kernel should not depend on it.) Triton lays the lanes
# of a block out over threads so that neighbours fall together, which CUDA leaves to you. But which addresses a block has is
# your choice: `transpose_kernel` in the exercises must read rows and write columns, and both coalesced.
#
# ### A row: three passes, or one
#
# Softmax needs the row's maximum, then the sum of the exponentials, then the quotients. Written as it is defined:


# %%
@triton.jit
def three_passes_kernel(x_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * cols
    top = -float("inf")
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < cols, other=-float("inf"))
        top = tl.maximum(top, tl.max(x, axis=0))
    total = 0.0
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < cols, other=-float("inf"))
        total += tl.sum(tl.exp(x - top), axis=0)
    for start in range(0, cols, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < cols)
        tl.store(out_ptr + tl.program_id(0) * cols + i, tl.exp(x - top) / total, mask=i < cols)


x = torch.randn(8, 200)
out = torch.empty_like(x)
with counted() as c:
    three_passes_kernel[(8,)](x, out, 200, BLOCK=64)
print("right:", torch.allclose(out, x.softmax(1)))
print(f"loaded {c.loaded / x.nbytes:.0f} times, stored {c.stored / x.nbytes:.0f} time")
print(f"operations on floats: {c.operations}, of them exponentials: {c.exps}")

# %% [markdown]
# `other` is what a masked lane gets: $-\infty$ changes neither the maximum nor the sum. (Without `other` it holds anything: 0
# in the interpreter, and on a GPU nobody says. `add_kernel` does without, since it stores no such lane.) Four moves of the
# row where two would do. If a row fits into one block, hold it (`softmax_kernel` in the exercises). If it does not (a
# vocabulary of 128,000 words), maximum and sum can still go in **one** pass. Two parts of a row, each with its maximum $m$
# and its sum $s = \sum e^{x - m}$, combine:
#
# $$m = \max(m_1, m_2) \qquad s = s_1\,e^{m_1 - m} + s_2\,e^{m_2 - m}$$
#
# This is the **online softmax** (Milakov and Gimelshein 2018, arXiv:1805.02867). The order of parts does not matter, and
# neither does how many there are: chapter 13's ring attention combines ranks' parts so. **Your turn.**


# %%
# %%task 14_triton logsumexp_kernel
@triton.jit
def logsumexp_kernel(x_ptr, out_ptr, cols, x_stride, BLOCK: tl.constexpr):
    """out[r] = log(sum over c of exp(x[r, c])), fp32 [rows]; x [rows, cols], fp32 or fp16.

    Grid (rows,). A row may be longer than BLOCK, and is loaded once all the same, BLOCK
    elements at a time: keep the maximum so far, and the sum of exp(x - maximum so far), which
    must be rescaled when the maximum grows. Elements may be -inf, a whole block of them too;
    but not a whole row.
    """
    raise NotImplementedError("logsumexp_kernel")


# %% [markdown]
# What tells a right one from others: a row that ascends (the maximum grows at every block), a block of $-\infty$ (then
# $m_1 - m$ is $-\infty + \infty$), and the bytes. With it, `cross_entropy_kernel` in the exercises makes loss *and* gradient
# in two loads and one store of the logits, before any backward is called. That is what Liger-Kernel does
# (arXiv:2410.10989): backward then has only to scale. And `rms_norm_kernel` adds the residual in the same kernel, as
# inference engines do.
#
# ### What need not be stored
#
# Dropout's backward needs the mask again. Stored, it costs a byte an element to write, and one to read. But pseudo-random
# numbers can be a *function*: Triton's `tl.rand(seed, i)` is Philox (Salmon et al. 2011), which computes the $i$-th number
# from nothing else, so backward draws it anew.


# %%
@triton.jit
def draw_kernel(out_ptr, n, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.rand(seed, i), mask=i < n)


drawn = {}
for seed, block in ((7, 64), (7, 32), (8, 64)):
    drawn[seed, block] = torch.empty(200)
    draw_kernel[(triton.cdiv(200, block),)](drawn[seed, block], 200, seed, BLOCK=block)
print("other blocks, same numbers:", torch.equal(drawn[7, 64], drawn[7, 32]))
print("another seed, same numbers:", torch.equal(drawn[7, 64], drawn[8, 64]))
print(f"dropped at p = 0.25: {(drawn[7, 64] < 0.25).float().mean():.2f}")

# %% [markdown]
# It is the trade of chapter 07 in the small: compute again what is cheap to compute. In `dropout_kernel` the grader
# changes BLOCK, and the same elements must be dropped.
#
# ### Products: a tile serves a row of others
#
# A product has $2MNK$ operations on $MK + KN + MN$ numbers: large matrices are far right of the corner, if they are read
# well. Here a program makes a row of the result, and so loads a row of $a$ and **all** of $b$:


# %%
@triton.jit
def row_product_kernel(a_ptr, b_ptr, c_ptr, N, K, BLOCK: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        b = tl.load(b_ptr + k * N + j, mask=j < N, other=0.0)
        total += tl.load(a_ptr + row * K + k) * b
    tl.store(c_ptr + row * N + j, total, mask=j < N)


M, N, K = 24, 32, 16
a, b, product = torch.randn(M, K), torch.randn(K, N), torch.empty(M, N)
with counted() as c:
    row_product_kernel[(M,)](a, b, product, N, K, BLOCK=32)
print("right:", torch.allclose(product, a @ b, atol=1e-5))
times = {"a": c.loaded_from["a_ptr"] / a.nbytes, "b": c.loaded_from["b_ptr"] / b.nbytes}
print(f"a is loaded {times['a']:.0f} time, b {times['b']:.0f} times")

# %% [markdown]
# A tile of $BM \times BN$ results needs $BM$ rows of $a$ and $BN$ columns of $b$. So $b$ is loaded once for every $BM$
# rows, not for every one, and
#
# $$\text{intensity} = \frac{2MNK}{e\,(MNK/BN + MNK/BM)} = \frac{2}{e}\cdot\frac{BM\,BN}{BM + BN},
# \qquad e \text{ bytes a number.}$$

# %% tags=["hide-input"]
predict(
    "bf16, square tiles, no cache. From which side of a tile on is a product right of the H100's corner of 295 operations a byte?",
    590,
    unit="rows",
    why="Square tiles give BM / 2 operations a byte. So 590, while 128 to 256 fit: the rest is the L2 cache's work, below.",
)

# %% tags=["hide-input"]
from refimpl.notebook.widgets_tiles import tile_knobs

tile_knobs()

# %% [markdown]
# The price of a tile is registers for its sums and shared memory for what is on its way. **Your turn.** `tl.dot(a, b, c)` is
# $ab + c$ of tiles; on a GPU it becomes instructions of the **tensor cores**, which multiply small matrices (16-bit numbers
# in, fp32 sums).


# %%
# %%task 14_triton matmul_kernel
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


# %% [markdown]
# **Which tile when.** Programs start in the order of their numbers, as many at once as fit, and those share the L2 cache.
# Take 9 x 9 tiles of a product whose $a$ and $b$ are 9 tiles wide, and 9 programs at once. Tile by tile along a row, they
# need one row of $a$ and all of $b$. As a square of 3 x 3 they need three rows and three columns. The kernel below looks up
# its tile in a list; `shared(9)` counts what each wave of 9 loads if it loads nothing twice:


# %%
@triton.jit
def touch_kernel(a_ptr, b_ptr, order_ptr, out_ptr, ROW: tl.constexpr, COL: tl.constexpr):
    pid = tl.program_id(0)
    m, n = tl.load(order_ptr + 2 * pid), tl.load(order_ptr + 2 * pid + 1)
    a = tl.load(a_ptr + m * ROW + tl.arange(0, ROW))  # a row of tiles of a, a number each
    b = tl.load(b_ptr + n * COL + tl.arange(0, COL))
    tl.store(out_ptr + pid, tl.sum(a, axis=0) + tl.sum(b, axis=0))


def waves(order, side=9):
    """Tiles that a wave of 9 programs loads, on average. A row of 9 tiles is held as 16 numbers."""
    a, b, out = torch.randn(side, 16), torch.randn(side, 16), torch.empty(side**2)
    places = torch.tensor(order, dtype=torch.int32)
    with counted(trace=True) as c:
        touch_kernel[(side**2,)](a, b, places, out, ROW=16, COL=16)
    loaded = c.shared(9)
    rows_and_columns = [loaded[name] // (16 * 4) for name in ("a_ptr", "b_ptr")]
    return [9 * found // side for found in rows_and_columns]  # of 9 tiles each, over 9 waves


tiles = [(m, n) for m in range(9) for n in range(9)]
orders = {
    "row by row": tiles,
    "3 x 3 squares": sorted(tiles, key=lambda t: (t[0] // 3, t[1] // 3, t)),
}
loads = {name: [*(found := waves(order)), sum(found)] for name, order in orders.items()}
pd.DataFrame.from_dict(loads, orient="index", columns=["tiles of a", "tiles of b", "together"])

# %% tags=["hide-input"] alt="Two grids of 9 x 9 tiles. Row by row, the first nine programs fill a row of the result and need a row of a and all of b. As a square they need three rows of a and three columns of b"
import matplotlib.pyplot as plt

figure, axes = show.figure(4.4, rows=2, columns=3)
for row, (name, order) in zip(axes, orders.items(), strict=True):
    wave = torch.tensor(order[:9])
    needed = torch.zeros(3, 9, 9)
    needed[0, wave[:, 0]] = 1
    needed[1, :, wave[:, 1]] = 1
    needed[2, wave[:, 0], wave[:, 1]] = 1
    for axis, title, image in zip(row, ("a", "b", "the first wave"), needed, strict=True):
        axis.imshow(image, cmap="Blues", vmin=0, vmax=1.5)
        axis.set(title=title, xticks=[], yticks=[])
        axis.spines[:].set_visible(True)
    row[0].set_ylabel(name)
plt.show()

# %% [markdown]
# 90 tiles a wave against 54, the figures of Triton's own tutorial. 132 tiles of 128, one for each multiprocessor of an
# H100, are as a square one tile of 1,470: 735 operations for each byte from memory, right of the corner. (From the cache
# each program still loads a byte for every 64 operations, and the cache has a limit of its own.) `grouped_tile` in the
# exercises computes the order from `pid`, the program's number.
#
# ### Attention: a product, a row, a product
#
# Now all of it at once. A program has BM queries and goes through keys and values BN at a time: a product gives BM x BN
# scores, the online softmax takes them in, a second product adds to the result. When the maximum grows, the *result so far*
# is rescaled by the same factor as the sum. No score ever leaves the multiprocessor. This is **flash attention** (Dao et al.
# 2022, arXiv:2205.14135; the loop over keys inside, as here, since FlashAttention-2, arXiv:2307.08691).
#
# Each program loads all the keys it may see. With $T/BM$ programs a head and half of the keys on average, $T^2/BM$ rows of
# $D$ numbers are loaded, of keys and values together: a large block of queries is what saves bytes.

# %% tags=["hide-input"]
predict(
    "T = 128, BM = BN = 16: 8 blocks of queries, 8 of keys, causal. How many of the 64 blocks of scores must be computed?",
    36,
    unit="blocks",
    why="8 on the diagonal and 28 below. A kernel that masks instead of skipping does 64, and is right: for long texts it "
    "takes twice the time.",
)

# %% [markdown]
# **Your turn.** Begin with logsumexp's loop.


# %%
# %%task 14_triton flash_kernel
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


# %% [markdown]
# ## 4. Read it: what the compiler makes of it
#
# In refimpl kernels stand beside torch's operators, one operation a file. This one is half of RMSNorm's backward: a program
# has some rows, computes their part of the input's gradient, and keeps a partial sum of the weight's, as your
# `column_sum_kernel` does.

# %% tags=["nbval-ignore-output"]
from refimpl.kernels import rms_norm as rms_norm_file

show.source(rms_norm_file.backward_kernel.fn)

# %% [markdown]
# Triton's compiler turns a block program into **warps** of threads. `num_warps` says how many share a block,
# `num_stages` how many tiles are on their way at once. It needs no GPU, so we can ask what a product of 16-bit matrices
# takes of an H100, in four configurations with strides that are multiples of 16, and in the first of these once more with
# strides of which nothing is known ("odd strides"). The last four rows count instructions. (It is compiled in a process of
# its own, which does not interpret.)

# %%
from refimpl.kernels.look import look

types = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"}
types |= dict.fromkeys(("M", "N", "K", "a_row", "b_row", "c_row"), "i32")
tile = {"BM": 128, "BN": 128, "BK": 64, "a_col": 1, "b_col": 1}
configurations = [
    {"num_warps": 8, "num_stages": 1},
    {"num_warps": 8, "num_stages": 3},
    {"num_warps": 8, "num_stages": 4, "BN": 256},
    {"num_warps": 4, "num_stages": 3, "BN": 256},
]
path = "../solutions/14_triton.py"
even = look(path, "matmul_kernel", types, tile, configurations, list(types))
odd = look(path, "matmul_kernel", types, tile, configurations[:1], ["a_ptr", "b_ptr", "c_ptr"])

# %% tags=["nbval-ignore-output"]
shown = ["BN", "num_warps", "num_stages", "registers", "stack", "shared", "programs"]
shown += ["tensor core", "copies ahead", "16-byte loads", "narrower loads"]
frame = pd.DataFrame([tile | row for row in [*even, *odd]])[shown]
frame.index = ["even"] * 4 + ["odd strides"]
frame.T

# %%
print("tensor cores in all:", all(row["tensor core"] for row in [*even, *odd]))
print("one stage copies ahead:", bool(even[0]["copies ahead"]), end="; ")
print("three do:", bool(even[1]["copies ahead"]))
print("spilled, by 8 warps:", even[2]["stack"] > 0, "| by 4:", even[3]["stack"] > 0)
print("odd strides load 16 bytes a thread:", bool(odd[0]["16-byte loads"]))

# %% [markdown]
# Read it as an expert does:
#
# - **registers** are a thread's, at most 255. A tile of 128 x 256 fp32 sums is 256 registers a thread with 4 warps, so some
#   are **spilled** to memory (`stack`), which costs bytes that no formula of yours has. With 8 warps it is 128, and fits.
# - **programs** is how many fit on one multiprocessor at once, by registers, shared memory and warps: times `num_warps`
#   over 64 it is the **occupancy**. A memory-bound kernel wants much, so that others compute while one waits. A product
#   wants large tiles instead and hides its waiting by **stages**: `cp.async` fetches the next tiles while tensor cores work.
# - **16-byte loads** are the widest a thread has. They need addresses that are multiples of 16 bytes. Triton looks at the
#   arguments of each launch: a pointer or stride that is a multiple of 16 gets a kernel of its own. An odd stride costs
#   narrow loads, so vocabularies and widths are padded.
# - No **tensor core** instruction where there should be one means fp32 inputs with `input_precision="ieee"`. (A tile of
#   few rows has one, filled up with rows that nobody wants.) With `tf32`, the default, fp32 factors keep 10 of their 23
#   bits of mantissa, and no test on a CPU shows it.
# - Nobody knows the best configuration beforehand: `@triton.autotune` times a list of them, once for each key of sizes.
#
# | | CUDA C++ | Triton | `torch.compile` | cuBLAS, cuDNN |
# |---|---|---|---|---|
# | you write | one thread | one block program | nothing | nothing |
# | layout over threads, coalescing | you | compiler | writes Triton | done |
# | shared memory, barriers | you | compiler | writes Triton | done |
# | tensor cores | by instruction | `tl.dot` | templates in Triton, or a library | done |
# | an operation of your own on the result (epilogue) | yes | yes | yes, fused | the listed ones |
# | online softmax over tiles | you | you | FlexAttention's template | flash attention |

# %% [markdown]
# ## 5. Measure it
#
# Formula beside count, for ten of the eleven exercises on small sizes (`grouped_tile` moves nothing). They are the
# solutions', not printed here; the grader compares yours in the same way.

# %%
from refimpl.grading.chapters import import_file
from refimpl.grading.kernels import launch
from pathlib import Path

done = import_file(Path(path), "done")
R, C, T, D = 6, 96, 64, 16


def new(*shape):
    return torch.randn(*shape)


def run(kernel, grid, *arguments, **constants):
    """Bytes loaded and stored, operations of tl.dot; nothing may lie outside, nothing may race."""
    c = launch(kernel, grid, *arguments, **constants)
    return c.loaded + c.stored, c.flops


x, y, w = new(R, C), new(R, C), new(C)
logits, target, ignored = new(R, C), torch.randint(C, (R,)), -100
qkv, heads = [new(2, T, D) for _ in range(3)], 2
MM = {"BM": 16, "BN": 16, "BK": 16}
n = x.nbytes
table = {
    "swiglu": (3 * n, 0, run(done.swiglu_kernel, (R, 2), x, y, new(R, C), C, C, C, C, BLOCK=64)),
    "transpose": (2 * n, 0, run(done.transpose_kernel, (1, 6), x, new(C, R), R, C, C, R, BLOCK=16)),
    "softmax": (2 * n, 0, run(done.softmax_kernel, (R,), x, new(R, C), C, C, C, BLOCK=128)),
    "logsumexp": (n + 4 * R, 0, run(done.logsumexp_kernel, (R,), x, new(R), C, C, BLOCK=32)),
    "rms_norm": (5 * n, 0, run(done.rms_norm_kernel, (R,), x, y, w, new(R, C), C, 1e-5, BLOCK=128)),
    "cross_entropy": (
        3 * n + (4 + 8 + 4) * R,
        0,
        run(done.cross_entropy_kernel, (R,), logits, target, new(R), C, C, ignored, 1.0, BLOCK=32),
    ),
    "column_sum": (n + 4 * 2 * C, 0, run(done.column_sum_kernel, (2, 3), x, new(2, C), R, C, BLOCK=32)),
    "dropout": (2 * n, 0, run(done.dropout_kernel, (9,), x, y, R * C, 0.1, 1, BLOCK=64)),
    "matmul": (
        4 * (48 * 64 * 2 + 64 * 32 * 3 + 48 * 32),
        2 * 48 * 32 * 64,
        run(
            done.matmul_kernel, (3, 2), new(48, 64), new(64, 32), new(48, 32),
            48, 32, 64, 64, 1, 32, 1, 32, **MM,
        ),
    ),
    "flash": (
        4 * heads * (2 * T * D + 2 * D * (T // 16) * (T + 16) // 2 + T),
        4 * heads * D * (T // 16) * (T + 16) // 2 * 16,
        run(
            done.flash_kernel, (T // 16, heads), *qkv, new(2, T, D), new(2, T), T, 1, 0.25,
            T * D, D, T * D, D, D=D, BM=16, BN=16,
        ),
    ),
}  # fmt: skip
frame = pd.DataFrame(
    [[b, found[0], f, found[1], (b, f) == found] for b, f, found in table.values()],
    index=list(table),
    columns=["bytes", "counted", "operations of tl.dot", "counted ", "equal"],
)
frame

# %% [markdown]
# (RMSNorm loads its weight once a program, $R$ times in all, which makes five times $n$.) So the formulas hold, and at real
# sizes they say where each kernel stands. Rows of 4096 in bf16; a product of $4096^3$ with tiles of 128 x 256, and with what
# an ideal cache leaves; attention at $T$ = 16,384, $D$ = 128, causal, with its scores in memory (written, read and
# written by softmax, read) and without.

# %%
E_ = 2  # bytes of bf16
width, S = 4096, 16384
pairs = S * S / 2  # of a query and a key that it sees
places = {
    "add": (1, 3 * E_),
    "softmax": (5, 2 * E_),
    "RMSNorm": (6, 4 * E_),
    "product, no cache": (2 * width**3, E_ * width**3 * (1 / 128 + 1 / 256)),
    "product, ideal cache": (2 * width**3, E_ * 3 * width**2),
    "attention, scores in memory": (4 * 128 * pairs, E_ * (4 * S * 128 + 4 * S * S)),
    "flash, BM = 128, no cache": (4 * 128 * pairs, E_ * 128 * (2 * S + 2 * pairs / 128)),
}
B, P = 3.35e12, 989e12
frame = pd.DataFrame(
    [[o / b, min(P, o / b * B) / 1e12] for o, b in places.values()],
    index=list(places),
    columns=["operations a byte", "TFLOP/s at most"],
)
frame.map("{:.3g}".format)

# %% tags=["hide-input"] alt="Roofline of an H100 from its data sheet: element-wise kernels at the left on the slope, attention with its scores in memory below the corner, products and flash attention near it"
figure, axis = show.figure(3.6)
line = [0.05, P / B, 3000]
axis.loglog(line, [min(P, i * B) / 1e12 for i in line], color="k")
for (name, row), marker in zip(frame.iterrows(), "os^DvPX", strict=True):
    axis.loglog(*row, marker, label=name, ms=7)
axis.set(
    xlabel="operations a byte",
    ylabel="TFLOP/s",
    title="H100 SXM, by its data sheet",
    ylim=(0.1, 3000),
)
axis.legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# A limit is not a time: these points are where a kernel *could* be. What is lost below the roof is overhead of launches,
# waiting that nothing hides, and tails (the last wave of programs does not fill the machine). Flash attention with blocks of
# 128 queries is left of the corner if every program reads keys and values from memory; but 8 MB of them, one head's, stay in
# the L2 cache while its programs run. And some roofs are not drawn.
# Flash attention makes one exponential for each score, beside $4D$ operations of products:

# %%
c = launch(
    done.flash_kernel, (T // 16, heads), *qkv, new(2, T, D), new(2, T), T, 1, 0.25,
    T * D, D, T * D, D, D=D, BM=16, BN=16,
)  # fmt: skip
blocks = heads * (T // 16) * (T // 16 + 1) // 2
print("exponentials of scores:", c.exps - blocks * 16, "=", blocks, "blocks of 16 x 16")
print("operations of tl.dot for each:", c.flops // (blocks * 256), "= 4 D")

# %% tags=["hide-input"]
predict(
    "An H100 makes 989 TFLOP/s in products and 3.9 T exponentials a second (FlashAttention-3, arXiv:2407.08608). At D = 128, "
    "how long do the exponentials take, as a share of the time of the products?",
    989e12 / (4 * 128) / 3.9e12 * 100,
    unit="%",
    why="A score costs 512 operations and one exponential: 989 / 512 = 1.93 T scores a second against 3.9 T. Half as long.",
)

# %% [markdown]
# So FlashAttention-3 computes the exponentials of one tile while the tensor cores multiply another.
#
# ## 6. Break it
#
# Three bugs that a comparison of results lets through.
#
# **A mask forgotten.** The vector sum again, without masks, on the first 1000 of 1024 numbers:


# %%
@triton.jit
def unmasked_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))


memory = torch.full((1024,), 7.0)
x, y, out = torch.ones(1024)[:1000], torch.ones(1024)[:1000], memory[:1000]
with counted() as c:
    unmasked_kernel[(4,)](x, y, out, 1000, BLOCK=256)
print("right:", torch.equal(out, x + y), "| behind it:", memory[1000:1003].tolist(), "were 7")
print("outside:", dict(c.outside))

# %% [markdown]
# The result is right. The neighbour in memory is gone, and on a GPU that is mostly another tensor: the symptom is a NaN in
# some other layer, some steps later. There `compute-sanitizer --tool memcheck` finds it only where no tensor lies.
# Here an address that is no element of its argument is counted.
#
# **A race.** Four programs add their part of a sum to one place:


# %%
@triton.jit
def racing_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.load(out_ptr) + tl.sum(tl.load(x_ptr + i), axis=0))


# %% tags=["hide-input"]
predict(
    "Four programs: each loads the sum so far, adds its part, and stores it. In the interpreter?",
    "right, always",
    options=["right, always", "right, mostly", "wrong"],
    why="It runs one program after the other. On a GPU all four may load 0, and then the last to store wins.",
)

# %%
x, out = torch.ones(64), torch.zeros(1)
with counted(trace=True) as c:
    racing_kernel[(4,)](x, out, BLOCK=16)
print("sum:", out.item(), "| races:", dict(c.races()))

# %% [markdown]
# The trace knows which program touched which place. `tl.atomic_add` is the cure that is right but adds in any order, so
# the last bits change from run to run; partial sums and a second kernel that adds them cost a few bytes more, and the bits
# stay the same.
#
# **A sum in 16 bits.** A product of ones and of 0.1s, with the sum (the *accumulator*) in fp16 and in fp32:


# %%
@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, K, SUM: tl.constexpr, B: tl.constexpr):
    i, total = tl.arange(0, B), tl.zeros((B, B), SUM)
    for start in range(0, K, B):
        a = tl.load(a_ptr + i[:, None] * K + start + i[None, :])
        b = tl.load(b_ptr + (start + i[:, None]) * B + i[None, :])
        total += tl.dot(a, b, out_dtype=SUM)
    tl.store(c_ptr + i[:, None] * B + i[None, :], total)


rows = {}
for K in (64, 512, 2048):
    a, b = torch.ones(16, K).half(), torch.full((K, 16), 0.1).half()
    exact = (a.double() @ b.double())[0, 0].item()
    errors = []
    for kind in (tl.float16, tl.float32):
        c = torch.empty(16, 16)
        dot_kernel[(1,)](a, b, c, K, SUM=kind, B=16)
        errors.append(f"{abs(c[0, 0].item() - exact) / exact:.2%}")
    rows[K] = errors
pd.DataFrame.from_dict(
    rows, orient="index", columns=["error, fp16 sums", "fp32 sums"]
).rename_axis("K")

# %% [markdown]
# It grows with $K$: when the sum is large, what is added is rounded away. At toy sizes it passes every tolerance. Test
# with long sums, all of one sign, and ask for the error, not for "close".
#
# Two limits of the interpreter itself: tf32 is not rounded, and bf16 arithmetic is silently wrong (numbers are kept as
# 16-bit integers), so load to fp32 at once. And what runs here may not compile: end with `look`, as in section 4.
#
# ## 7. Prove it
#
# - Exercises: [exercises/14_triton](../exercises/14_triton/exercise.py), eleven tasks; `pytest exercises/14_triton`.
# - Cards: `refimpl quiz --topic performance`, `--topic internals`, `--topic advanced`, or `Quiz("performance")` of
#   `refimpl.notebook` in a cell.
# - refimpl: [refimpl/kernels](../refimpl/kernels/__init__.py), the kernels of this project; [count.py](../refimpl/kernels/count.py), the counter;
#   its tests, [test_count.py](../tests/kernels/test_count.py).
# - Triton: its tutorials 01 to 06 (`python/tutorials` of triton-lang/triton); Tillet, Kung and Cox 2019, MAPL.
# - Online softmax: arXiv:1805.02867. FlashAttention 1, 2, 3: arXiv:2205.14135, 2307.08691, 2407.08608. Liger-Kernel:
#   arXiv:2410.10989. Roofline: Williams, Waterman and Patterson 2009, CACM 52(4).
# - DeepSpeed has kernels in CUDA (`csrc/`) and some in Triton (`deepspeed/ops/triton_ops`, and for inference
#   `deepspeed/ops/transformer/inference/triton`).
