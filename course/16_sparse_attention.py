# %% [markdown]
# # 16 · Sparse attention: blocks that are read, and blocks that are not
#
# Attention compares every token with every other. For long texts most of that is spent on pairs that do not matter. This
# chapter leaves them out, block by block: you draw the patterns of the papers, write attention that reads the blocks of a
# pattern and no others, forward and backward, count what that costs, and find out what a model can no longer see. You
# need chapter 14.

# %% [markdown]
# ## 1. The pain: every token with every other
#
# A head $D$ wide over $T$ tokens takes $4\,T^2 D$ FLOPs forward: $2\,T^2 D$ for the scores $QK^{\mathsf T}$, as much for the
# weighted mean of the values. (A causal kernel that skips the future does half of it.) What the layer's matrices do grows
# with $T$ and not with $T^2$: $24\,w^2$ FLOPs a token for a layer of width $w$.

# %%
# %load_ext refimpl.notebook

# %%
import pandas as pd
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
w = 4096  # the width of a model of 7 billion parameters; its heads together are as wide
rows = {}
for T in (2048, 8192, 32_768, 131_072):
    attention, matrices = 4 * T * T * w, 24 * T * w * w
    rows[f"{T:,}"] = [
        f"{attention / 1e12:,.1f}",
        f"{matrices / 1e12:,.1f}",
        f"{attention / (attention + matrices):.0%}",
    ]
columns = ["attention, TFLOP", "matrices, TFLOP", "attention's share"]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# FlashAttention (chapter 14) cured the *memory* of attention: no matrix of scores is written. The work stayed. And of the 8.6
# billion pairs of a token and an earlier one in a text of 131,072, not every layer needs all.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "From how many tokens on does attention multiply more than the matrices of the layer, at w = 4096? "
    "(4 T^2 w = 24 T w^2)",
    6 * 4096,
    unit="tokens",
    why="T = 6 w: attention is the smaller part of a layer up to six times its width.",
)

# %% [markdown]
# ## 2. The idea: a layout of blocks
#
# Leaving out single pairs saves nothing: processors multiply tiles, and a tile with one score in it costs what a full one
# does. So one leaves out whole **blocks** of $b \times b$ scores. A **layout** has an entry for each: row $r$ says which
# blocks of keys the $r$-th block of queries reads. With $n = T/b$ blocks a side, and the **density** for the share of the
# $n^2$ blocks that is read,
#
# $$\text{FLOPs} = 4\, b^2 D \cdot (\text{blocks read}) = \text{density} \cdot 4\,T^2 D .$$
#
# Nearly every published pattern is a union of six parts. Here are four; the other two are `rows`, blocks of queries that
# read everything, and `drawn`, blocks at random:

# %%
from refimpl.model.patterns import parts
from refimpl.notebook import show

show.source(parts.window, parts.stretches, parts.columns, parts.strided, docstrings=False)

# %% [markdown]
# And these are the unions, by DeepSpeed's names. (The last three are none of its: Sparse Transformers' strided pattern,
# and the global and the random part on their own.)

# %% tags=["hide-input"]
from refimpl.model.patterns.base import density
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.plain import (
    DenseSparsityConfig,
    GlobalSparsityConfig,
    RandomSparsityConfig,
    StridedSparsityConfig,
)
from refimpl.model.patterns.sliding import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    LocalSlidingWindowSparsityConfig,
)
from refimpl.model.patterns.variable import VariableSparsityConfig

H, b = 2, 4
PATTERNS = {
    "dense": DenseSparsityConfig(H, b),
    "local": LocalSlidingWindowSparsityConfig(H, b, 3, attention="bidirectional"),
    "fixed": FixedSparsityConfig(H, b),
    "variable": VariableSparsityConfig(
        H, b, local_window_blocks=[2, 4], global_block_indices=[5]
    ),
    "bslongformer": BSLongformerSparsityConfig(H, b, global_block_indices=[0, 8]),
    "bigbird": BigBirdSparsityConfig(H, b, seed=0),
    "strided": StridedSparsityConfig(H, b),
    "global": GlobalSparsityConfig(H, b),
    "random": RandomSparsityConfig(H, b, num_random_blocks=3, seed=0),
}
figure, axes = show.figure(5.2, rows=3, columns=3)
for axis, (name, pattern) in zip(axes.flat, PATTERNS.items(), strict=True):
    layout = pattern.make_layout(64)[0]
    axis.imshow(1 - layout, cmap="gray", vmin=-0.6, vmax=1.1)
    axis.set_title(f"{name} {density(layout):.0%}", fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(False)

# %% [markdown]
# A row of such a picture is a block of queries, dark is what it reads. In a causal model all that is right of the
# diagonal is left out too. How do they grow? A row of `local`, `bigbird`, `variable` and `bslongformer` reads a fixed
# number of blocks, whatever $n$ is, but for the few global ones: the whole is linear in $T$. `fixed` and `strided` read
# about $l + n/l$ a row, least for $l = \sqrt n$: $O(n\sqrt n)$ when $l$ grows so.

# %% tags=["hide-input"]
predict(
    "fixed, with stretches of l = 4 blocks, one representative each, for 64 blocks, not causal. "
    "How many blocks does a row read?",
    4 + 64 // 4 - 1,
    unit="blocks",
    why="4 of its own stretch, and the representatives of the 15 other stretches (its own stretch's is counted): 19.",
)

# %% [markdown]
# Write it: which blocks are in a stretch together, which are representatives, and what causality leaves of them.


# %%
# %%task 16_sparse_attention fixed_layout
def fixed_layout(n: int, local: int, causal: bool) -> Tensor:
    """Sparse Transformers' fixed pattern: bool [n, n].

    The sequence is cut in stretches of `local` blocks, the last one perhaps shorter. A row
    reads its own stretch, and of every stretch the last block: its representative. causal: a
    row reads nothing that comes after it.

    fixed_layout(4, 2, True) is
        #...
        ##..
        .##.
        .###
    """
    raise NotImplementedError("fixed_layout")


# %% [markdown]
# ## 3. Build it: attention that skips
#
# The obvious way to get the right numbers is a mask, and it saves nothing. Counted by an instrument that sees every product
# of torch's, on 512 tokens in 16 blocks of 32. BigBird's pattern reads a third of the 16 x 16 blocks of scores:

# %%
from refimpl.grading.work import Work
from refimpl.model.sparse import block_sparse_attention

torch.manual_seed(0)
T, D, block = 512, 16, 32
q, k, v = (torch.randn(1, 1, T, D) for _ in range(3))
layout = BigBirdSparsityConfig(1, block, seed=0).make_layout(T)
mask = layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)


def masked(q, k, v):
    scores = (q @ k.transpose(2, 3) / D**0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def skipping(q, k, v):
    return block_sparse_attention(q, k, v, layout, block)


full = 4 * T * T * D
for way in (masked, skipping):
    with Work() as work:
        out = way(q, k, v)
    print(
        f"{way.__name__:9} {work.flops:>10,} FLOPs, {work.flops / full:.3f} of dense attention's"
    )
print(
    f"density   {density(layout):.3f};  equal: {torch.allclose(masked(q, k, v), out, atol=1e-6)}"
)

# %% [markdown]
# How does one skip? Row by row: a block of queries takes the keys and values of its own blocks out of the sequence
# (a *gather*), and what follows is plain attention of $b$ queries over as many keys as it has. A GPU kernel does not even
# gather: it walks a list of block numbers and loads each where it lies. One thing more is kept for backward, the log of each
# row's sum of exponentials, $\mathrm{lse}$: with it a probability is $\exp(s - \mathrm{lse})$, without another look at the
# row.
#
# Three cases need care. A row may read **nothing**: softmax of nothing is $0/0$, and zeros are wanted. On the **diagonal** a
# causal model must mask token by token. And blocks **beyond** the diagonal must not be read at all, though they may stand
# in the layout.

# %% tags=["hide-input"]
predict(
    "A causal model, blocks of 64 tokens. The diagonal block is in the layout, and nobody masks inside it. How many tokens "
    "of the future does the first token of a block see?",
    63,
    unit="tokens",
    why="All the others of its block. The last token of a block sees none: the leak differs from token to token.",
)


# %%
# %%task 16_sparse_attention sparse_forward
def sparse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v over the blocks of `layout` [n, n]: (out [T, D], lse [T]),
    fp32.

    q, k, v [T, D] fp32, one head. lse is the log of the sum of a row's exponentials. causal:
    token i sees no token after i; blocks that are in the layout but wholly in the future are
    then not read either. A row of tokens that sees nothing gives zeros, and lse -inf. Cost:
    4 b^2 D FLOPs a block that is read, and no tensor larger than a row of blocks, b x T.
    """
    raise NotImplementedError("sparse_forward")


# %% [markdown]
# **Backward** walks the same blocks: five products a block where forward has two. Row $r$ needs its scores again, then
#
# $$dV_c \mathrel{+}= P_{rc}^{\mathsf T}\, dO_r, \quad dS_{rc} = P_{rc} \circ (dO_r V_c^{\mathsf T} - d_r), \quad
# dQ_r \mathrel{+}= dS_{rc} K_c, \quad dK_c \mathrel{+}= dS_{rc}^{\mathsf T} Q_r,$$
#
# where $d_r$ is the sum of $dO_r \circ O_r$ over features, $\circ$ multiplies element by element, and the scores' factor
# $1/\sqrt D$ is left out. Mind the two kinds of sums: $dQ$ has one row's blocks, $dK$ and
# $dV$ have one *column's*. A kernel that gives each program a block of keys therefore needs the lists of columns, too; one that
# gives each program a row adds into $dK$ from many programs.


# %%
# %%task 16_sparse_attention sparse_backward
def sparse_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    out_grad: Tensor,
    layout: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of sparse_forward's q, k, v, each [T, D], from what it returned and the
    gradient of `out`.

    With p = exp(scores - lse), s = scores and the row sums d = sum(out_grad * out): dv = p^T
    out_grad, dp = out_grad v^T, ds = p (dp - d), dq = ds k / sqrt(D), dk = ds^T q / sqrt(D).
    Cost: 10 b^2 D FLOPs a block that is read (scores are made again), and no tensor larger than
    b x T. A block of keys is read by many rows: its gradient is the sum over them.
    """
    raise NotImplementedError("sparse_backward")


# %% [markdown]
# ## 4. Read it
#
# In refimpl, tiles that read the same number of blocks are gathered a few at a time and multiplied as one batch; rows that
# read the same blocks are one taller tile. The scores of a few tiles are all that is ever alive:

# %%
from refimpl.model.blocked import BlockSparse

show.source(BlockSparse.forward, docstrings=False)

# %% [markdown]
# (It keeps no $\mathrm{lse}$: it has a row's blocks together, and makes their softmax again in backward.) On a GPU
# [the Triton kernel](../refimpl/kernels/block_sparse_attention.py) takes its place, which walks lists: for each row
# where its list begins, and all lists behind one another. That is what `block_lists` of the exercises makes.
#
# ## 5. Measure it
#
# FLOPs are density times dense attention's, exactly. Is the time? Gathering costs copies, and small tiles fill the multipliers
# badly, so it depends on $b$. Here: 2,048 tokens, 2 heads 64 wide, forward and backward, a window and a global
# block, beside torch's own fused attention (which reads everything):

# %% tags=["nbval-ignore-output"]
import time

from refimpl.model.tiles import Plan


def seconds(attention, *inputs, turns=4):
    taken = []
    for _ in range(turns):
        start = time.process_time()
        torch.autograd.grad(attention(*inputs).sum(), inputs)
        taken.append(time.process_time() - start)
    return min(taken)


T, D = 2048, 64
q, k, v = (torch.randn(1, 2, T, D, requires_grad=True) for _ in range(3))
dense_time = seconds(F.scaled_dot_product_attention, q, k, v)
rows = {}
for block in (128, 64, 32, 16):
    plan = Plan(
        BSLongformerSparsityConfig(2, block, num_sliding_window_blocks=3).make_layout(T)
    )
    took = seconds(lambda *x: block_sparse_attention(*x, plan, block), q, k, v)
    part = took / dense_time
    rows[f"b = {block}"] = [
        plan.blocks // 2,
        f"{plan.density:.3f}",
        f"{part:.3f}",
        f"{part / plan.density:.1f}",
    ]
columns = ["blocks a head", "density", "time / dense", "time / (density x dense)"]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# Small blocks have the smaller density for the same window, and pay more for each block. DeepSpeed's blocks of 16 came from
# matrix units that took 16 x 16 tiles; today's take 64 rows, and blocks of 64 or 128 are usual. The FLOPs agree with the
# formula to the last one:

# %%
plan = Plan(BSLongformerSparsityConfig(2, 64).make_layout(T))
with Work() as forward:
    out = block_sparse_attention(q, k, v, plan, 64)
with Work() as backward:
    out.sum().backward()
counted = {"forward": forward.flops, "backward": backward.flops}
formula = {"forward": 4 * plan.blocks * 64**2 * D, "backward": 10 * plan.blocks * 64**2 * D}
show.compare(formula, counted)

# %% [markdown]
# ## 6. What can a model still see?
#
# What is not read in one layer may arrive in several: layer 1 carries a token's content to a neighbour, layer 2 from there to
# the next. A window of $w$ blocks reaches $\lfloor w/2 \rfloor$ blocks further in each layer. A **global** block is a hub:
# everybody reads it, it reads everybody, so anything is two layers from anything. Random blocks make shortcuts (BigBird's
# argument: a random graph's diameter grows as the logarithm of its size).

# %% tags=["hide-input"]
predict(
    "A causal window of 4,096 tokens, 32 layers (Mistral 7B). How many tokens back can the last layer have heard of?",
    4096 * 32,
    unit="tokens",
    why="4,096 a layer, 131,072 in all: what Mistral's authors call the theoretical attention span.",
)


# %%
# %%task 16_sparse_attention layers_to_see
def layers_to_see(layout: Tensor) -> Tensor:
    """How many layers it takes until a block has heard of another: int64 [n, n]; -1 where it
    never does.

    In one layer row r takes from the blocks that it reads. In the next it takes what those have
    taken, and so on. A block knows itself after 0 layers. With a window of 3 blocks, [0, 2] is
    2. The layout is the same in all layers.
    """
    raise NotImplementedError("layers_to_see")


# %% [markdown]
# Is it so? A **needle in a text**: one block of a random text holds one of 8 codes, the last block is asked which. An
# encoder of two layers learns that with each pattern. "In reach" are the texts whose needle lies where two layers can carry it
# to the last block, "beyond" the others.

# %% tags=["nbval-ignore-output"]
from refimpl.model.needle import learn

rows = {}
for name in ("dense", "local", "fixed", "variable", "bigbird"):
    layout = PATTERNS[name].make_layout(64)[0].float()
    two = ((layout @ layout)[-1, :-1] > 0).float().mean().item()
    found = learn(PATTERNS[name])
    beyond = "" if found.beyond != found.beyond else f"{found.beyond:.0%}"
    rows[name] = [f"{density(layout):.0%}", f"{two:.0%}", f"{found.reached:.0%}", beyond]
columns = ["density", "blocks in reach", "right, in reach", "right, beyond"]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# Beyond reach a model can only guess, one in eight. (In reach, `local` and `variable` have learned less in the same steps: few
# of their texts teach them anything.) The cheapest of these patterns that finds everything has a hub. That is an
# easy task: one thing to remember. Hubs are narrow, and a text that asks for many things at once overfills them. GPT-3,
# Gemma 2 and 3 and gpt-oss have no hubs: they mix dense layers among windowed ones.

# %% [markdown]
# ## 7. Let the text choose
#
# All patterns so far are drawn before the text is known. **Native sparse attention** (Yuan et al. 2025) looks first:
# each block of keys is represented by one, here its mean (in the paper a small network makes it), and each query
# attends to these $T/b$ representatives. That coarse attention says which blocks deserve to be read in full; besides
# them a window is read, and a learned gate mixes the three. The first look is $1/b$ of dense attention's work.
#
# Here all queries of a block read the same selection, and so do the heads that share a head of keys: otherwise a block
# would be fetched for one query at a time, and the gather would cost more than the product. In the paper only the heads
# share: each query selects for itself, and the kernel multiplies its whole group of heads at once.


# %%
# %%task 16_sparse_attention select_blocks
def select_blocks(q: Tensor, k: Tensor, block: int, count: int) -> Tensor:
    """A choice in the manner of native sparse attention: which blocks each block of queries
    reads (in the paper each query chooses for itself, with its group of heads): bool [n, n];
    causal.

    q, k [T, D], one head. A block of keys is represented by its mean. Each token attends to the
    means of the blocks that ended before it: softmax(q mean^T / sqrt(D)); a token that has none
    gives nothing. A row wishes for a block by the sum of these probabilities over its own
    tokens. It reads the `count` blocks before it that it wishes for most (all, if there are
    fewer), and its own. Cost: 2 T n D FLOPs, no tensor larger than T x n and T x D.
    """
    raise NotImplementedError("select_blocks")


# %% [markdown]
# Below, blocks 3 and 9 of a text of 16 hold something alike, which the queries from block 10 on look for:

# %% tags=["hide-input"]
from refimpl.model.native_sparse import coarse, selected

torch.manual_seed(3)
block, n, D = 8, 16, 16
q, k = torch.randn(1, 1, n * block, D), torch.randn(1, 1, n * block, D)
wanted = 1.5 * torch.randn(D).sign()
q[:, :, 10 * block :] += wanted
for hiding in (3, 9):
    k[:, :, hiding * block : (hiding + 1) * block] += wanted
chosen = selected(coarse(q, k, block), block, count=2)[0, 0]
figure, axis = show.figure(3)
axis.imshow(~chosen, cmap="gray", vmin=-0.6, vmax=1.1)
axis.set_xlabel("block of keys")
axis.set_ylabel("block of queries")
axis.grid(False)

# %%
print("rows 10 to 15 all read blocks 3 and 9:", bool(chosen[10:, [3, 9]].all()))
print("blocks read:", int(chosen.sum()), "of", n * (n + 1) // 2)

# %% [markdown]
# Selection is a top-k: it has no gradient. What is learned of it is learned through the coarse attention, whose scores it uses
# and whose output is in the sum.
#
# ## 8. Break it: a loss that is too good
#
# A pattern called *unidirectional* leaves out the blocks of the future. DeepSpeed's `SparseSelfAttention` does just that, and
# leaves the tokens *inside* the diagonal block to the caller's `attn_mask`. Who forgets it trains a model that reads ahead.
# Nothing fails: the loss is excellent. Two models learn random letters, 8 kinds, of which nothing can be predicted beyond
# $\ln 8 = 2.08$:

# %%
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.sparse import SparseAttention
from refimpl.model.sparse_swap import SparseGPTAttention


def learn_noise(causal, steps=60):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=8, context=64, width=32, layers=1, heads=2))
    pattern = LocalSlidingWindowSparsityConfig(2, 16, 3)  # unidirectional
    plain = model.blocks[0].attention
    model.blocks[0].attention = SparseGPTAttention(plain, SparseAttention(pattern, 64, causal))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(steps):
        text = torch.randint(0, 8, (32, 65))
        loss = model(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


masked_loss, leaking_loss = learn_noise(causal=True), learn_noise(causal=False)
print(f"masked by token:  not below ln 8: {masked_loss > 2.0}")
print(f"masked by block:  far below it:   {leaking_loss < 1.6}")

# %% [markdown]
# The sign is a loss below what is possible, and samples that are worse than the loss says. The test: change token $i + 1$ and see
# whether output $i$ moves. `sparse_attention` of our JSON masks by token whatever the pattern says.
#
# A second one, from DeepSpeed's own code: products and softmax were cached in a dictionary of the *class*, by length alone. Two
# layers with different patterns and one length shared the first one's. Ours keep their plans apart, and
# [a test](../tests/deepspeed/test_sparse_attention.py) says so.

# %%
from refimpl.deepspeed.ops.sparse_attention import SparseSelfAttention

x = torch.randn(1, 2, 64, 8)
fixed = SparseSelfAttention(FixedSparsityConfig(2, 8), max_seq_length=64)
local = SparseSelfAttention(LocalSlidingWindowSparsityConfig(2, 8, 1), max_seq_length=64)
print("two patterns, one length, two results:", not torch.equal(fixed(x, x, x), local(x, x, x)))

# %% [markdown]
# ## 9. Use it
#
# The JSON is DeepSpeed's. It exchanges the attention of our GPT, and of transformers' models (BERT, GPT-2, Llama, ... all that
# call their attention by its register), without a change to their code:
#
# ```json
# {"sparse_attention": {"mode": "bigbird", "block": 64, "num_random_blocks": 1, "num_sliding_window_blocks": 3}}
# ```
#
# | | pattern | kernel | today |
# |---|---|---|---|
# | DeepSpeed | fixed, variable, BigBird, Longformer, local | three products over lists, fp16 | removed in 0.19.7 |
# | torch FlexAttention | any function of positions, as a block mask and a token mask | compiled Triton (C++ on CPUs), or FlashAttention 4's: `BACKEND="FLASH"` | current |
# | FlashAttention 2 | a window | its own | current |
# | refimpl | all of the above by block | gathered tiles; Triton on GPUs | |
#
# ## 10. Prove it
#
# - **Exercises:** [exercises/16_sparse_attention](../exercises/16_sparse_attention/exercise.py):
#   `pytest exercises/16_sparse_attention`
# - **Quiz:** `refimpl quiz --topic advanced`, or `Quiz("advanced")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [test_sparse.py](../tests/model/test_sparse.py) (numbers, gradients, blocks read, FLOPs),
#   [test_patterns.py](../tests/model/test_patterns.py) (layouts as pictures),
#   [test_sparse_swap.py](../tests/model/test_sparse_swap.py) (transformers' models),
#   [test_native_sparse.py](../tests/model/test_native_sparse.py), [test_needle.py](../tests/model/test_needle.py).
# - **Code:** [parts.py](../refimpl/model/patterns/parts.py), [tiles.py](../refimpl/model/tiles.py),
#   [blocked.py](../refimpl/model/blocked.py), [sparse.py](../refimpl/model/sparse.py), [native_sparse.py](../refimpl/model/native_sparse.py),
#   [block_sparse_attention.py](../refimpl/kernels/block_sparse_attention.py).
# - **DeepSpeed:** [its tutorial](https://www.deepspeed.ai/tutorials/sparse-attention/), and deepspeed/ops/sparse_attention/
#   in releases before 0.19.7.
# - **Papers:** Child et al. 2019, [arXiv:1904.10509](https://arxiv.org/abs/1904.10509) (strided and fixed). Beltagy et al.
#   2020, [arXiv:2004.05150](https://arxiv.org/abs/2004.05150) (Longformer). Zaheer et al. 2020,
#   [arXiv:2007.14062](https://arxiv.org/abs/2007.14062) (BigBird). Yuan et al. 2025,
#   [arXiv:2502.11089](https://arxiv.org/abs/2502.11089) (native sparse attention). Jiang et al. 2023,
#   [arXiv:2310.06825](https://arxiv.org/abs/2310.06825) (Mistral's window). Dong et al. 2024,
#   [arXiv:2412.05496](https://arxiv.org/abs/2412.05496) (FlexAttention).
