# %% [markdown]
# # 13 · Three dimensions, and the fourth: one model, one text, many ranks
#
# Data, pipeline and tensor parallelism divide sequences, layers and matrices. None of them divides a *sequence*, and
# texts grow. This chapter builds the axis that does, context parallelism, and then lays all four on one machine: who is
# whose neighbour, which sums run over which ranks, and what it costs. You need chapters 01, 04, 07, 11 and 12.

# %% [markdown]
# ## 1. The pain: one long text
#
# A Llama-like model of 8 billion parameters: 32 blocks of width 4096, with 8 heads of keys and values for 32 of queries.
# Tensor parallelism over the 8 GPUs of a node, with sequence parallelism, so activations are divided by 8, but for the
# inputs of the cut matrices. What one sequence alone leaves for backward on each GPU (blocks, head and loss), in GB. The
# last column is what attention would write if it were not fused, the scores of one of the 32 heads in one block:

# %%
# %load_ext refimpl.notebook

# %%
import pandas as pd

from refimpl.plan.kept import activations
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import Shape


def llama(tokens):
    return Shape(
        32, 4096, 32, 128_256, tokens, 14_336, 8, matrices=3, biases="none", positions=False
    )


rows = {}
for tokens in (8192, 32_768, 131_072, 1_048_576):
    kept = [
        activations(llama(tokens), Mesh(1, 1, 8, 1, recompute=again)) for again in (False, True)
    ]
    scores = 2 * tokens**2  # bytes of one head's, in 16 bits
    rows[f"{tokens:,} tokens"] = [f"{n / 1e9:,.1f}" for n in (*kept, scores)]
names = ["all kept", "blocks computed again", "scores of ONE head, if written out"]
pd.DataFrame.from_dict(rows, orient="index", columns=names)

# %% [markdown]
# Counted on a small GPT, by the hooks of chapter 07: what autograd keeps, a text of 64 tokens, then 128, 256.

# %%
import torch
from torch.autograd.graph import saved_tensors_hooks

from refimpl.model.gpt import GPT, GPTConfig

torch.set_num_threads(1)
for tokens in (64, 128, 256):
    model = GPT(GPTConfig(vocab=256, context=tokens, width=64, layers=2, heads=2))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}
    with saved_tensors_hooks(
        lambda t, kept=kept: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        loss = model(ids, ids)
    sizes = (t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
    print(f"{tokens} tokens: {sum(sizes) / tokens:,.0f} bytes a token")

# %% [markdown]
# A token leaves 9,800 bytes, however long the text is. So there is one way to keep less on a rank: fewer tokens on it.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "The last row, 111 GB though blocks are computed again. With 64 times as many GPUs, all kept busy: which use of them "
    "makes the activations on a GPU smaller?",
    "none of these",
    options=[
        "data parallel",
        "ZeRO-3 over them",
        "a pipeline of 8 times as many stages",
        "none of these",
    ],
    why="Data parallelism and ZeRO leave a whole sequence to a GPU. A stage of 1/8 of the layers keeps 8 times as many "
    "micro-batches alive under 1F1B: the product stays. (One sequence alone would be divided by 8, while 7 stages idle.)",
)

# %% [markdown]
# Tensor parallelism could go on only beyond the node, where its all-reduces in every layer are slow, and past the 8
# heads of keys, which must then be copied. So the tokens themselves must be dealt out. For nearly all of a transformer
# that is trivial: norms, linear layers, GELU, the loss look at one token at a time. One layer does not: attention.

# %% [markdown]
# ## 2. The idea: softmax in any order
#
# Each of $c$ ranks has $S = T/c$ tokens: their queries $q$, keys $k$, values $v$. A query's output needs all keys,
#
# $$o = \frac{\sum_j e^{s_j}\, v_j}{\sum_j e^{s_j}}, \qquad s_j = q \cdot k_j / \sqrt d .$$
#
# Numerator and denominator are sums, and sums can be made in parts. Let a rank have seen the keys of a set $A$, and know
# $o_A$ and one number, $\ell_A = \log \sum_{j \in A} e^{s_j}$. Then $e^{\ell_A} o_A$ is the numerator so far, and with
# another set $B$
#
# $$\ell = \log\!\left(e^{\ell_A} + e^{\ell_B}\right), \qquad
# o = e^{\ell_A - \ell}\, o_A + e^{\ell_B - \ell}\, o_B .$$
#
# Both shares are at most 1, so nothing overflows, whatever the scores. It is not an approximation: the same softmax,
# added in another order. So keys can come by one set after the other, and be forgotten:
#
# ```mermaid
# flowchart LR
#   subgraph r0["rank 0: queries 0"]
#     A["keys 0, then 3, 2, 1"]
#   end
#   subgraph r1["rank 1: queries 1"]
#     B["keys 1, then 0, 3, 2"]
#   end
#   subgraph r2["rank 2: queries 2"]
#     C["keys 2, then 1, 0, 3"]
#   end
#   subgraph r3["rank 3: queries 3"]
#     D["keys 3, then 2, 1, 0"]
#   end
#   r0 -->|k, v| r1 -->|k, v| r2 -->|k, v| r3 -->|k, v| r0
# ```
#
# This is **ring attention** (Liu et al. 2023), with the running softmax of Milakov and Gimelshein (2018) that
# FlashAttention uses inside one GPU. No rank ever holds $T \times T$ scores, nor all keys.
#
# **Your turn.** The merge of two sets, in a few lines; `%hint 13_three_d merge` helps. One case needs a thought: a query
# that sees nothing of a set has $\ell = -\infty$ there.


# %%
# %%task 13_three_d merge
def merge(one: Part, other: Part) -> Part:
    """Attention over two sets of keys, from attention over each of them.

    A Part is the pair (out, lse) of one set: out [..., Q, D], softmax attention of Q queries
    over it, and lse [..., Q], the log of the sum of exp(score) over it; both fp32. Returned is
    that of all keys together. A query that sees no key of a set has lse -inf and out 0 there;
    if it sees none of either, so has the result. Scores may be in the thousands. A NaN in an
    out stays to be seen. Inputs are not changed.
    Example: lse 0 and 0 -> the mean of both outs, lse log(2). lse 3 and -inf -> the first.
    """
    raise NotImplementedError("merge")


# %% [markdown]
# ## 3. Build it: the ring on real ranks
#
# `Layout` says which tokens a rank has, `ring_attention` is the ring (its forward is your exercise `ring_attention`).
# Four ranks, grouped heads, forward and backward, beside plain attention over the whole sequence:

# %%
# %%ranks 4
import torch.nn.functional as F

from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.ring import ring_attention
from refimpl.plan.context import ring_sent

B, H, K, T, D = 1, 4, 2, 64, 8  # K heads of keys and values, each for two of queries
torch.manual_seed(0)  # alike on all ranks: each then takes its part
whole = [torch.randn(B, heads, T, D) for heads in (H, K, K)]
layout = Layout(T, world_size)
q, k, v = (layout.cut(x, rank, dim=2).requires_grad_() for x in whole)

group.ledger.reset()
out = ring_attention(q, k, v, group, layout)
out.square().sum().backward()

plain = [x.clone().requires_grad_() for x in whole]
expected = F.scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=True)
expected.square().sum().backward()
pairs = [
    (out, expected),
    (q.grad, plain[0].grad),
    (k.grad, plain[1].grad),
    (v.grad, plain[2].grad),
]
off = max((mine - layout.cut(one, rank, dim=2)).abs().max().item() for mine, one in pairs)
print("output and gradients differ by less than 1e-5:", off < 1e-5)
print(
    "bytes sent:", sum(group.ledger.sent_bytes().values()),
    "| formula:", ring_sent(k.numel(), world_size, itemsize=4),
)  # fmt: skip

# %% [markdown]
# The formula, with $M$ the bytes of a rank's keys: forward sends $2(c-1)M$, keys and values $c-1$ hops far. Backward
# sends them round again, and with them their gradients, which every rank adds to and which need one hop more to be home:
# $2(c-1)M + 2cM$. (The gradients travel in fp32. Where keys are in 16 bits, the second $M$ is twice the first.)
#
# **What it costs in time.** A ring can attend to one set while the next one is on its way. A hop's compute grows with
# $S^2$, its bytes with $S$: so with enough tokens a rank the traffic is hidden. How many? For forward, on an A100 of 312
# TFLOP/s of which half is reached, with half of the scores masked, and 2 bytes an element:

# %%
from refimpl.plan.judge import Machine

machine = Machine()
rows = {}
for link, bandwidth in {
    "inside a node": machine.node,
    "between nodes": machine.network,
}.items():
    for what, share in {"all heads have keys": 1, "8 of 32 heads have keys": 8 / 32}.items():
        # S^2 w 4 operations / 2 for the mask; 2 S w share 2 bytes
        tokens = (2 * share * 2 / bandwidth) / (4 / 2 / (0.5 * machine.peak))
        rows[f"{link}, {what}"] = [f"{bandwidth / 1e9:.0f}", f"{tokens:,.0f}"]
pd.DataFrame.from_dict(rows, orient="index", columns=["GB/s", "tokens a rank that hide a hop"])

# %% [markdown]
# Grouped heads make the ring cheap: keys and values are a quarter as large. That is also why Llama 3 does without a ring:
# it *gathers* all keys and values before attention, the same bytes in one exposed call, and keeps plain kernels and any
# mask (Llama team 2024, section 3.3.2). The price is memory for all keys and values of a layer, $2\,T\,K d$ elements for
# $K$ heads of $d$ features.
#
# **Ulysses** (Jacobs et al. 2023) takes another way. Attention of one head needs no other head. So before attention each
# rank gives away tokens and gets heads, by an all-to-all, and after it the reverse:

# %%
# %%ranks 4
from refimpl.parallel.context.ulysses import ulysses
from refimpl.plan.context import ulysses_sent


def heads_for_tokens(x):
    """[H, S, D] -> [H/N, T, D]: rank r gets the r-th part of the heads, with all tokens."""
    parts = torch.stack(x.chunk(world_size, 0))  # [N, H/N, S, D], part r for rank r
    arrived = torch.empty_like(parts)
    group.all_to_all(arrived, parts)
    return torch.cat(arrived.unbind(), 1)


mine = heads_for_tokens(q[0].detach())
print("one head, all its tokens:", torch.equal(mine[0], whole[0][0, rank]))

group.ledger.reset()
q, k, v = (layout.cut(x, rank, dim=2).requires_grad_() for x in whole)
out = ulysses(q, k, v, group)
out.square().sum().backward()
print("as plain attention:", torch.allclose(out, layout.cut(expected, rank, dim=2), atol=1e-5))
print(
    "bytes sent:", sum(group.ledger.sent_bytes().values()),
    "| formula:", ulysses_sent(B * T // world_size, H, K, D, world_size, itemsize=4),
)  # fmt: skip

# %% tags=["hide-input"]
predict(
    "From 8 to 32 ranks, the sequence as long as before, as many heads of keys as of queries. How does what a rank "
    "sends in one layer change?",
    "the ring's stays nearly, Ulysses' falls to about a quarter",
    options=[
        "both stay",
        "the ring's stays nearly, Ulysses' falls to about a quarter",
        "both fall to a quarter",
    ],
    why="All keys but its own pass through each rank, however many ranks there are. An all-to-all moves what a rank has, "
    "T/N tokens.",
)

# %% [markdown]
# Both formulas for the model above, one sequence of 131,072 tokens in bf16, MB a rank and layer, forward and backward:

# %%
from refimpl.plan.context import ring_sent, ulysses_sent

rows, tokens, width = {}, 131_072, 128
for ranks in (2, 8, 32, 64):
    ring = ring_sent(tokens // ranks * 8 * width, ranks, itemsize=2)
    try:
        other = f"{ulysses_sent(tokens // ranks, 32, 8, width, ranks, itemsize=2) / 1e6:,.0f}"
    except ValueError as refused:
        other = "refused"
        print(refused)
    rows[f"{ranks} ranks"] = [f"{ring / 1e6:,.0f}", other]
pd.DataFrame.from_dict(rows, orient="index", columns=["ring", "Ulysses"])

# %% [markdown]
# (From 8 to 32 ranks Ulysses falls to 0.44 here, not to a quarter: 8 heads of keys must be repeated to give each of 32
# ranks one.) Ulysses sends less, but nothing hides its all-to-alls: attention waits for one, what comes after it for the
# other. A ring sends more, under attention. So: Ulysses where links are fast and ranks are few, up to the number of heads;
# a ring beyond; or both, Ulysses inside a node and a ring across. Ulysses' heads are also what tensor parallelism divides:
# with tp = 8 and 32 heads there are 4 left to deal out.
#
# **Names.** Megatron-LM's option is `--context-parallel-size`, and `--cp-comm-type` chooses: `p2p` is the ring,
# `all_gather` Llama 3's way, `a2a` Ulysses, `a2a+p2p` both levels. DeepSpeed has Ulysses and calls it sequence
# parallelism; Megatron-LM's *sequence parallelism* is another thing, chapter 11's, over the tensor ranks. torch's
# `context_parallel` is experimental: it gathers the keys (the default) or passes them on.

# %% [markdown]
# ## 4. Half the ranks idle: the causal mask
#
# A token looks back, not ahead. Rank 0 of the ring above had the first quarter of the text, and looked at nothing that
# came by.

# %% tags=["hide-input"]
predict(
    "Causal attention over 4 ranks, each with a run of T/4 tokens. How many times the mean work has the last rank?",
    7 / 4,
    unit="x",
    why="In blocks of T/4 by T/4: rank i has i whole ones and half of its own. The last 3.5, the mean is 2: (2N - 1)/N.",
)

# %% [markdown]
# All others wait for it, so the ring takes nearly twice as long as it should. Who counts the operations of matrix
# products? torch, whatever runs:

# %%
# %%ranks 4
from torch.utils.flop_counter import FlopCounterMode

T = 512
for zigzag in (False, True):
    layout = Layout(T, world_size, zigzag)
    # In bf16: the one kernel that does it in fp32 is not counted.
    q, k, v = (torch.randn(1, 2, T // world_size, 8).bfloat16() for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        ring_attention(q, k, v, group, layout)
    group.barrier()
    done = torch.tensor([counter.get_total_flops()])
    of_all = torch.empty(world_size, dtype=done.dtype)
    group.all_gather(of_all, done)
    if rank == 0:
        name = "zigzag" if zigzag else "runs"
        print(f"{name:7} thousands of operations, rank by rank: {(of_all // 1000).tolist()}")
        print(f"{'':7} scores that count: {[layout.work(r) for r in range(world_size)]}")

# %% [markdown]
# (A block on the diagonal is computed whole and masked, so operations are a bit more than scores that count.) **Zigzag**
# cuts the text into $2c$ chunks and gives rank $r$ an early one and a late one, $r$ and $2c - 1 - r$. The picture below
# your task counts it for 8 chunks, a square for a chunk of queries and one of keys, coloured by the rank that has the
# queries: with one run each, the ranks have 3, 7, 11 and 15 squares; with zigzag 9 each. Llama 3, Megatron-LM and torch do
# so. *Striped attention* (Brandon et al. 2023) gives a rank every $c$-th token instead.


# %%
# %%task 13_three_d zigzag
def zigzag(tokens: int, ranks: int) -> list[Tensor]:
    """Where each rank's tokens stand in a sequence of `tokens`, so that causal attention is
    equal work for all.

    The sequence is cut into 2 N equal chunks. Rank r has chunk r, then chunk 2 N - 1 - r, each
    from its first token to its last. -> for every rank int64 [tokens / N]. ValueError if there
    are no 2 N equal chunks.
    Example: zigzag(8, 2) -> [0, 1, 6, 7] and [2, 3, 4, 5].
    """
    raise NotImplementedError("zigzag")


# %% tags=["nbval-ignore-output", "hide-input"]
import matplotlib.pyplot as plt

from refimpl.notebook import show
from refimpl.parallel.context.layout import Layout

tones = ["#2a6f97", "#c1666b", "#e0a458", "#55a868"]
figure, axes = show.figure(2.9, columns=2, sharey=True)
for axis, zigzag in zip(axes, (False, True), strict=True):
    layout = Layout(8, 4, zigzag)
    owner = {p: r for r in range(4) for p in layout.positions(r).tolist()}
    for query in range(8):
        for key in range(query + 1):
            axis.add_patch(plt.Rectangle((key, query), 0.94, 0.94, color=tones[owner[query]]))
    axis.set(xlim=(0, 8), ylim=(8, 0), aspect="equal", xticks=[], yticks=[], xlabel="keys")
    axis.set_title("zigzag" if zigzag else "runs", fontsize=10)
axes[0].set_ylabel("queries, coloured by rank")
plt.show()

# %% [markdown]
# ## 5. Read it: backward, from one number a query
#
# Beside this rank's q, k and v forward keeps `out` and `lse`; nothing of the scores, no other rank's keys. When keys
# come by again in backward, each probability is $p_j = e^{s_j - \ell}$: no second softmax is needed. First what a rank
# does with one set of keys, tile by tile, then the ring around it:

# %%
from refimpl.parallel.context.blocks import Back
from refimpl.parallel.context.ring import Ring

show.source(Back.see, Ring.backward, docstrings=False)

# %% [markdown]
# `delta` is what softmax's backward takes off each row, $\sum_j p_j\, \partial p_j = o \cdot \partial o$: again one number
# a query. The model around it is swapped from outside, two lines of it are different
# ([swap.py](../refimpl/parallel/context/swap.py)): the attention, and which rows of the position embeddings are read.

# %% [markdown]
# ## 6. Break it: a mean of means
#
# Two common bugs. With either of them training goes on, and its loss falls.
#
# **The loss.** A sequence of 64 tokens over 2 ranks; the first 40 are a prompt, which is not to be learned: their targets
# are -100, which `cross_entropy` leaves out. Each rank calls it and gets the mean over *its* tokens, and gradients are
# averaged as in data parallelism.

# %% tags=["hide-input"]
predict(
    "Rank 0 has 32 tokens, all masked; rank 1 has 32, of which 24 count. Gradients are averaged over the ranks. By which "
    "factor is the averaged gradient off, if rank 0's 0/0 is made 0?",
    0.5,
    why="Rank 1's mean is the right one, and the average with rank 0's zeros halves it. With uneven counts it is not even "
    "the same factor for all tokens.",
)

# %%
# %%ranks 2
import torch.nn.functional as F

from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.loss import cross_entropy

IGNORED = -100
torch.manual_seed(0)
x, weight = torch.randn(1, 64, 16), torch.randn(16, 50)
targets = torch.randint(50, (1, 64))


def gradient(loss_of):
    """Of the weight, averaged over the ranks."""
    w = weight.clone().requires_grad_()
    loss_of(layout.cut(x, rank) @ w, layout.cut(masked, rank)).backward()
    group.all_reduce(w.grad, "mean")
    return w.grad


def naive(logits, targets):
    return F.cross_entropy(logits[0], targets[0], ignore_index=IGNORED).nan_to_num()


for prompt, zigzag in ((40, False), (20, False), (20, True)):
    layout = Layout(64, world_size, zigzag)
    masked = targets.clone()
    masked[:, :prompt] = IGNORED
    w = weight.clone().requires_grad_()
    F.cross_entropy((x @ w)[0], masked[0], ignore_index=IGNORED).backward()
    mean_of_means = gradient(naive)
    by_token = gradient(lambda logits, targets: cross_entropy(logits, targets, group))
    if rank == 0:
        cosine = F.cosine_similarity(mean_of_means.flatten(), w.grad.flatten(), dim=0)
        print(
            f"prompt {prompt}, {'zigzag' if zigzag else 'runs':6} | mean of means: "
            f"length x {mean_of_means.norm() / w.grad.norm():.2f}, direction {cosine:.3f} | "
            f"by token: right is {torch.allclose(by_token, w.grad, atol=1e-6)}"
        )

# %% [markdown]
# In the first row the gradient is half as long as it should be, which AdamW would not notice; in the second it points
# elsewhere. Zigzag spreads the prompt over both ranks and hides most of it: the loss curve will not tell you.
#
# The remedy is one number: all ranks' tokens, summed before backward; each rank's *sum* of losses is multiplied with
# $c\,/\,\text{tokens}$. The same holds over data-parallel ranks and over micro-batches: one token, one vote. (Megatron-LM
# has `--calculate-per-token-loss` for it. In 2024 transformers' Trainer was found to have averaged micro-batches' means.)
# Where ranks share sequences, refimpl's engine weighs the tokens of a micro-batch so by itself, over all ranks that have
# some. Where each rank has sequences and a loss of its own, it averages these losses, as DeepSpeed's engine does, and
# `refimpl.token_mean(total, tokens, engine.group)` makes that right.


# %%
# %%task 13_three_d token_weight
def token_weight(group: Group, targets: Sequence[Tensor]) -> float:
    """What a rank multiplies each micro-batch's *sum* of losses with before backward.

    `group`: the data-parallel times the context ranks; their gradients are averaged, those of
    micro-batches add up.
    targets: one int64 tensor of any shape for each of this rank's micro-batches, perhaps none.
    The gradient must be that of the mean loss over all tokens of the step, whoever has them;
    IGNORED ones do not count. Without any token: a finite number. One all-reduce of one number.
    Example: 1 token on rank 0, and 2 + 1 on rank 1: 2 / 4 on both.
    """
    raise NotImplementedError("token_weight")


# %% [markdown]
# **The shift.** A token's target is the next token. Many models shift inside: `loss(logits[:, :-1], tokens[:, 1:])`. With
# the sequence cut, the last token of each rank's part loses its target (the sequence's last has none anyway), and under
# zigzag two chunks are joined that are not neighbours:

# %%
from itertools import pairwise

for zigzag in (False, True):
    layout = Layout(16, 2, zigzag)
    for rank in range(2):
        positions = layout.positions(rank)
        shifted_here = list(pairwise(positions.tolist()))
        wrong = [pair for pair in shifted_here if pair[1] != pair[0] + 1]
        lost = [p for p in positions.tolist() if p < 15 and (p, p + 1) not in shifted_here]
        name = "zigzag" if zigzag else "runs"
        print(f"{name:7} rank {rank}: {lost} lost their targets, wrong (token, target) {wrong}")

# %% [markdown]
# Shift the whole sequence first, then cut inputs, targets *and positions* alike: your exercise `context_batch`.

# %% [markdown]
# ## 7. All axes on one machine
#
# Now there are four sizes, dp x pp x cp x tp, and as many ranks as their product. A **mesh** is nothing but a way of
# counting: ranks are numbered row by row, the last axis fastest, and a rank's group on an axis are those that differ from
# it on that axis alone. (`Mesh` of chapter 01; `coordinates` and `mesh_groups` are exercises.) The order decides who
# shares a node.

# %% tags=["hide-input"]
predict(
    "Which axis should have consecutive ranks, so that it lies inside a node? In the order of need, most first:",
    ["tensor", "context", "data and pipeline"],
    order=True,
    why="Tensor: several all-reduces in every layer, for which the next operation waits. Context: one exchange a "
    "layer, hidden behind attention. Data: once a step, hidden behind backward. Pipeline: least bytes, between two neighbours.",
)

# %% [markdown]
# A 70-billion-parameter model on 512 GPUs as dp 8 x pp 4 x cp 2 x tp 8, sequences of 8,192 tokens, 256 of them a step, with
# recomputation. GB that a rank sends on each axis (of the busiest rank), and the seconds they take on either link (the
# alpha-beta model of chapter 01, beta alone):

# %%
from refimpl.plan.shape import of_size
from refimpl.plan.traffic import busiest

SEVENTY, layout = of_size(70e9, context=8192), Mesh(dp=8, pp=4, cp=2, tp=8, batch=256)
rows = {}
for axis, sent in busiest(SEVENTY, layout).items():
    times = [sent / link for link in (machine.node, machine.network)]
    rows[axis] = [f"{sent / 1e9:,.1f}", *(f"{t:.1f}" for t in times)]
seconds = SEVENTY.flops(256, recompute=True) / layout.gpus / machine.peak / machine.efficiency
print(f"compute: {seconds:.1f} s a step")
columns = ["GB a step", "s inside a node", "s between nodes"]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# With tensor parallelism across nodes a step would wait longer for it than it computes. And there is latency. A block
# makes four all-reduces of its tokens' activations (when it runs forward twice six in Megatron-LM, five in refimpl, where
# the second run stops before the last one), and in each alpha is paid $2(t-1)$ times, for $t$ tensor ranks. A short message
# of 512 tokens, with an alpha of 3 microseconds inside a node and 20 between nodes:

# %%
from refimpl.plan.time import Link, ring_all_reduce_seconds

SHORT = 512 * 8192 * 2  # bytes: 512 tokens of width 8192
for name, link in {
    "inside a node": Link(3e-6, machine.node),
    "between nodes": Link(20e-6, machine.network),
}.items():
    for ranks in (2, 8):
        whole = ring_all_reduce_seconds(SHORT, ranks, link)
        waits = 2 * (ranks - 1) * link.alpha
        print(
            f"{name}, {ranks} ranks: {1e6 * whole:4.0f} us, of which alpha {1e6 * waits:4.0f}"
        )

# %% [markdown]
# Turn the knobs: the model of section 1 on 16 GPUs, a layout of them (outermost axis first), and a rank. Coloured are the
# ranks of its group on each axis. Gradients travel over dp and cp together; their bytes stand at dp.

# %% tags=["hide-input"]
from refimpl.notebook.widgets_mesh import mesh_knobs

mesh_knobs(
    Shape(32, 4096, 32, 128_256, 8192, 14_336, 8, matrices=3, biases="none", positions=False),
    layouts=[
        "pp2 dp2 cp2 tp2",
        "dp2 pp2 cp2 tp2",
        "tp2 cp2 pp2 dp2",
        "dp2 tp8",
        "pp2 tp8",
        "dp16",
        "dp4 cp4",
    ],
    ranks=[5, 0, 15],
)

# %% [markdown]
# Two orders are in use. Megatron-LM, DeepSpeed and refimpl put the pipeline outermost, since it sends least; Llama 3 puts
# data outermost, [dp, pp, cp, tp], since its gathers can be made early and endure latency.


# %%
# %%task 13_three_d mesh_groups
def mesh_groups(axes: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """The groups along some axes: ranks are in one group if their coordinates on all *other*
    axes are equal.

    Each group is in the order of its ranks, and groups in that of their first ranks. Every rank
    is in one of them.
    Examples, axes {"dp": 2, "tp": 2}: along ["tp"] -> [[0, 1], [2, 3]], ["dp"] -> [[0, 2],
    [1, 3]], ["tp", "dp"] -> [[0, 1, 2, 3]], [] -> [[0], [1], [2], [3]].
    """
    raise NotImplementedError("mesh_groups")


# %% [markdown]
# **Put together by hand.** Every part is there: a plan splits the matrices (chapter 11), `context_parallel` swaps the
# attention, `PipelineModule` deals out layers (chapter 12), ZeRO-1 stands on what is left, the **replicas**: dp x cp,
# since the ranks of one sequence have the same weights and other tokens. `stage.spans` tells ZeRO over which other ranks
# the gradient's norm is summed, and which parameters more than one of them holds; what that is for comes below. One
# function for any layout:

# %%
from refimpl import launch
from refimpl.comm.mesh import Mesh as Ranks
from refimpl.model.data import Batches, corpus
from refimpl.parallel.context.swap import context_parallel
from refimpl.parallel.pipeline.gpt import gpt_layers
from refimpl.parallel.pipeline.module import PipelineModule
from refimpl.parallel.styles import gpt_plan
from refimpl.parallel.swap import parallelize
from refimpl.parallel.tensor import Parted
from refimpl.zero.config import ZeroConfig
from refimpl.zero.zero1 import Zero1

CONFIG = GPTConfig(vocab=256, context=32, width=64, layers=4, heads=4)
SEQUENCES, MICRO, STEPS = 8, 2, 4  # of a step; of a micro-batch


def train(sizes, count_once=True):
    """On every rank: losses, norms, bytes sent in the last step by tag, parameters here."""
    mesh = Ranks({axis: sizes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")})
    place, replicas = mesh.coordinates, mesh.group("dp", "cp")
    torch.manual_seed(0)
    model = parallelize(GPT(CONFIG), gpt_plan(CONFIG.heads, CONFIG.vocab), mesh.group("tp"))
    layout = Layout(CONFIG.context, mesh.size("cp"), zigzag=mesh.size("cp") > 1)
    context_parallel(model, mesh.group("cp"), layout)
    pipeline = PipelineModule(gpt_layers(model), mesh.group("pp"), model.loss)

    adamw = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
    stage = Zero1(pipeline, adamw, replicas, ZeroConfig(gradient_clipping=1.0))
    copies = [*pipeline.repeated, *whole_on_all(pipeline)] if place["tp"] else pipeline.repeated
    stage.spans(mesh.group("pp", "tp"), copies if count_once else [])

    losses, norms = [], []
    for step in range(STEPS):
        mesh.ledger.reset()
        batch = Batches(corpus(), CONFIG.context, SEQUENCES).batch(step, 0)
        mine = (layout.cut(x.chunk(mesh.size("dp"))[place["dp"]], place["cp"]) for x in batch)
        with stage.no_sync():  # the replicas' gradients meet once, in `step`
            loss = pipeline.forward_backward(*(list(x.split(MICRO)) for x in mine)).mean()
        stage.step()
        sent = mesh.ledger.sent_bytes("tag")
        loss = loss.reshape(1)
        replicas.all_reduce(loss, "mean")
        losses.append(loss.item())
        norms.append(stage.grad_norm)
    return losses, norms, sent, sum(p.numel() for p in pipeline.parameters())


def whole_on_all(model):
    """Parameters that every tensor rank holds whole: norms, biases of sums, positions."""
    parts = {
        layer.get_parameter(name)
        for layer in model.modules()
        if isinstance(layer, Parted)
        for name in layer.splits
    }
    return [p for p in model.parameters() if p not in parts]


one = launch.run(train, {}, ranks=1)[0]
eight = launch.World(8)
cut = eight.call(train, {"pp": 2, "dp": 2, "tp": 2})
text = eight.call(train, {"pp": 2, "cp": 2, "tp": 2})
rows = {"one process": [*(f"{x:.2f}" for x in one[0]), one[3]]}
rows["pp 2 x dp 2 x tp 2"] = [*(f"{x:.2f}" for x in cut[0][0]), cut[0][3]]
rows["pp 2 x cp 2 x tp 2"] = [*(f"{x:.2f}" for x in text[0][0]), text[0][3]]
columns = [*(f"loss {step}" for step in range(STEPS)), "parameters on rank 0"]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# Eight processes, one loss curve. Not the same bits: sums are made in another order. The parameters are a bit more than a
# quarter, since norms, biases of sums and positions are whole on tensor ranks, and the tied embedding is on both stages.

# %%
for found in (cut, text):
    off = max(abs(a - b) for a, b in zip(found[0][0], one[0], strict=True))
    norms = max(abs(a / b - 1) for a, b in zip(found[0][1], one[1], strict=True))
    alike = all(rank[1] == found[0][1] for rank in found)
    print(
        f"losses within 1e-5: {off < 1e-5} | norms within 1e-5: {norms < 1e-5}, alike on all 8: {alike}"
    )

# %% [markdown]
# **One norm over all axes.** Clipping needs the norm of the *whole* gradient. Its parts lie on pp x tp ranks, so squares
# are summed over those. But not everything there is a part: a norm's weight is whole on every tensor rank, the tied
# embedding on first and last stage. Each counts once. (Over dp x cp nothing is counted twice: ZeRO's shards are parts.)
# Forget it, and training clips harder than it says, here by a third and more:

# %%
twice = eight.call(train, {"pp": 2, "dp": 2, "tp": 2}, False)
for name, found in {"once": cut, "by every holder": twice}.items():
    print(f"{name:16} norms {[f'{x:.2f}' for x in found[0][1]]}")
off = max(abs(a - b) for a, b in zip(twice[0][0], one[0], strict=True))
print("losses differ by more than any rounding:", off > 1e-4)

# %% [markdown]
# The famous relatives: a rank that sees an overflow skips its step while others take theirs; a clip by each stage's own
# norm; a data-parallel group without cp, so that the ranks of a sequence drift apart. All are one question: *this sum,
# over which axes?*
#
# | what | over | why |
# |---|---|---|
# | gradients (mean), ZeRO's shards | dp x cp | same parameters, other tokens |
# | loss's count of tokens | dp x cp | the same |
# | norm, overflow flag | pp x tp, and ZeRO's shards | other parameters; copies once |
# | partial products, row layers | tp | parts of one sum |
# | keys and values | cp | other tokens of one sequence |
# | tied weights' gradients | first and last stage | one parameter, two uses |
# | dropout's seed on whole tensors | alike on tp, apart on dp and cp | chapter 11 |
#
# **Bytes on every axis**, formula beside count, rank 0 of pp 2 x cp 2 x tp 2, fp32. A rank's border between layers is
# $b = 2 \cdot 16 \cdot 64$ elements, there are 4 micro-batches and 2 blocks a stage:

# %%
from refimpl.zero.flat import ALIGN, round_up

m, border, blocks = SEQUENCES // MICRO, 2 * 16 * 64 * 4, CONFIG.layers // 2
keys, held = border // 4 // 2, text[0][3]  # elements of keys on a tensor rank
formula = {
    "tp: 4 all-reduces a block, 1 of the embedding": m * (4 * blocks + 1) * border,
    "cp: the ring": m * blocks * ring_sent(keys, 2, itemsize=4),
    "pp: activations": m * border,
    "pp: the tied embedding's gradient": (256 // 2 * 64 + 1) * 4,
    "dp x cp: ZeRO-1": 2 * round_up(held, 2 * ALIGN) * 4 // 2,
}
tags = text[0][2]
counted = {
    "tp: 4 all-reduces a block, 1 of the embedding": tags["tensor"],
    "cp: the ring": tags["keys and values"] + tags["gradients of keys and values"],
    "pp: activations": tags["pipeline activations"],
    "pp: the tied embedding's gradient": tags["pipeline shared gradients"],
    "dp x cp: ZeRO-1": tags["gradients"] + tags["parameters"],
}
show.compare(formula, counted)

# %% [markdown]
# (An all-reduce over two ranks sends its size once. `+ 1`: a flag that says whether there is a gradient. ZeRO's shards
# are padded to multiples of 64 elements.)
#
# **The engine does the same from a file**: `"pipeline": {"stages": 2}`, `"tensor_parallel": {"autotp_size": 2}`,
# `"sequence_parallel_size": 2`; all other ranks are data-parallel, and `zero_optimization` works over the replicas.

# %%
import refimpl


def by_file(steps=2):
    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": SEQUENCES // MICRO // 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": 2},
        "tensor_parallel": {"autotp_size": 2},
    }
    engine = refimpl.initialize(model=GPT(CONFIG), config=settings)[0]
    losses = []
    for step in range(steps):
        batch = Batches(corpus(), CONFIG.context, SEQUENCES).batch(step, 0)
        mine = (x.chunk(2)[engine.axes.feed].split(MICRO) for x in batch)
        losses.append(engine.train_batch(zip(*mine, strict=True)).item())
    return losses


losses = eight.call(by_file)[0]
eight.stop()
print("as by hand:", max(abs(a - b) for a, b in zip(losses, one[0], strict=False)) < 1e-5)

# %% [markdown]
# `refimpl demo --mesh dp=2,pp=2,tp=2` trains the demo's text so, beside one process, and tells for every rank what it
# keeps and what it sends on each axis, with the formulas' numbers.
#
# **Why ZeRO-1 and not more.** A pipeline runs many micro-batches a step. ZeRO-2 reduces gradients after each, ZeRO-3
# gathers weights twice for each:

# %%
from refimpl.plan import formulas

layout_of_stage = formulas.Layout(2_000_000_000, padding=0, buckets=0)
rows = {}
for name in ("zero1", "zero2", "zero3"):
    state = sum(formulas.memory_bytes(name, 16, 2, layout_of_stage).values())
    cells = [f"{state / 1e9:.1f}"]
    for m in (1, 8, 32):
        sent = formulas.traffic(name, 16, 2, layout_of_stage, micro_batches=m)
        cells.append(f"{sum(x.bytes for x in sent if x.tag != 'norm') / 1e9:,.0f}")
    rows[name] = cells
columns = ["state GB", *(f"GB sent, m = {m}" for m in (1, 8, 32))]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# (2 billion parameters a stage, 16 replicas, bf16.) The pipeline has divided weights and gradients by its stages already.
# The engine refuses stages 2 and 3 with a pipeline, and says so. Whoever has memory can keep what was gathered for the
# whole step: Llama 3 shards optimizer and gradients and does *not* reshard weights after forward (section 3.3.2 there).
#
# **HSDP** is a mesh too. ZeRO-3 over 512 ranks gathers across 64 nodes in every layer. Shard inside a node, replicate
# across: `{"replicate": 2, "shard": 2}`. A gradient is reduce-scattered inside the node, and only a rank's *shard* of it
# all-reduced across:

# %%
# %%ranks 4
from refimpl.comm.mesh import Mesh as Ranks

mesh = Ranks({"replicate": 2, "shard": 2})  # two nodes of two
inside, across = mesh.group("shard"), mesh.group("replicate")
torch.manual_seed(rank)
gradient = torch.randint(-8, 8, (1024,)).float()
mean = gradient.clone()
group.all_reduce(mean, "mean")

mine = torch.empty(1024 // inside.size)
inside.reduce_scatter(mine, gradient, "mean", tag="inside a node")
across.all_reduce(mine, "mean", tag="across nodes")
print("my shard of the mean:", torch.equal(mine, mean.chunk(inside.size)[inside.rank]))
sent = mesh.ledger.sent_bytes("tag")
print({tag: sent[tag] for tag in ("inside a node", "across nodes")}, "of", gradient.nbytes)

# %% [markdown]
# Across nodes a rank sends $2 \cdot \frac{n}{s} \cdot \frac{r-1}{r}$ for a shard of $n/s$, and nothing in forward. The price:
# state is divided by the $s$ GPUs of a node, not by all. In the engine's JSON: `mics_shard_size` in `zero_optimization`.

# %% [markdown]
# How others do it:
#
# | | refimpl | Megatron-Core | torchtitan | DeepSpeed |
# |---|---|---|---|---|
# | axes, outermost first | pp, dp, cp, tp | the same (`tp-cp-ep-dp-pp`, read from inside) | pp, dp replicated, dp sharded, cp, tp | pipe, data, model |
# | long sequences | ring, Ulysses | ring, gather, Ulysses, two levels | torch's, the parts that `context_parallel` is made of | Ulysses |
# | a rank's tokens under a causal mask | zigzag | zigzag | zigzag; with FlexAttention's masks blocks by their work, if asked | all, of some heads |
# | weights alike, other tokens | dp x cp | dp x cp, "with context parallel" | `dp_shard` x `cp`, which FSDP shards over | data x sequence |

# %% [markdown]
# ## 8. Measure it: the planner beside what others have run
#
# With formulas for bytes, bubble and time, choosing a layout is a search (your exercise `best_layout`). `refimpl plan
# --params 70B --gpus 512`, the first lines:

# %%
from refimpl.plan.search import search

found = search(of_size(70e9), 512, 512, machine)
rows = []
for v in found.fit[:6]:
    layout = f"dp {v.mesh.dp} pp {v.mesh.pp} tp {v.mesh.tp}"
    rows.append(
        [
            layout,
            v.mesh.zero,
            f"{v.total / 1e9:.0f}",
            f"{v.bubble:.0%}",
            f"{v.step:.1f}",
            v.limit,
        ]
    )
print(f"{len(found.fit)} layouts fit, {len(found.over)} do not")
pd.DataFrame(rows, columns=["layout", "ZeRO", "GB", "bubble", "step s", "waits most for"])

# %% [markdown]
# Believe a planner when it knows runs that it has not seen. Table 1 of Narayanan et al. (2021): GPTs on A100s, layout
# by hand. `efficiency`, the share of the peak that large products reach, is 0.62 for all rows, nothing else is fitted.
# What lies between products (norms, softmax, activations) goes at the speed of the GPU's memory: what a block keeps for
# backward passes through it seven times a step, if forward runs twice, at 2 TB/s. The last column leaves that out:

# %%
from dataclasses import replace

from refimpl.plan.judge import judge
from refimpl.plan.published import LLAMA, MEGATRON


def planned(run, zero, machine=machine):
    step = judge(run.shape, run.mesh(zero), machine).step
    return run.shape.flops(run.batch, recompute=True) / step / run.gpus / 1e12


rows = []
for run in MEGATRON:
    ours = planned(run, "ddp")
    products = planned(run, "ddp", replace(machine, reads=float("inf")))
    size = run.shape.parameters / 1e9
    layout = f"dp {run.dp} pp {run.pp} tp {run.tp}"
    off = [f"{speed / run.tflops - 1:+.0%}" for speed in (ours, products)]
    rows.append(
        [run.billions, f"{size:,.1f}", run.gpus, layout, run.tflops, f"{ours:.0f}", *off]
    )
columns = ["billions", "by formula", "GPUs", "layout", "TFLOP/s a GPU", "planned", "off"]
pd.DataFrame(rows, columns=[*columns, "products alone"])

# %% [markdown]
# The smaller a model, the more of its time lies between products: their work grows with the square of the width, what a
# block keeps with the width. Table 2 of the same paper asks what happens without a mesh: ZeRO-3 alone, each model's batch
# fixed (but for 2,560 sequences in the place of 2,240 on 640 GPUs), on more and more GPUs. Below, beside them, the same
# models with tp 8 and pp 12 (or 35):

# %%
from refimpl.plan.published import PTD, ZERO3


rows = []
for alone, meshed in zip(ZERO3, PTD, strict=True):
    rows.append([alone.billions])
    for run, zero in ((alone, "zero3"), (meshed, "ddp")):
        ours = planned(run, zero)
        off = f"{ours / run.tflops - 1:+.0%}"
        rows[-1] += [run.gpus, run.tflops, f"{ours:.0f}", off]
columns = ["GPUs", "TFLOP/s", "planned", "off"]
pd.DataFrame(rows, columns=["billions", *columns, *(f"{name}, mesh" for name in columns)])

# %% [markdown]
# Weights travel twice for each micro-batch, whatever is in it: with one sequence a GPU in the place of four the same bytes
# hide behind a quarter of the work. (ZeRO-3 is planned 7 to 34% too fast: this planner hides perfectly what can be hidden.)
#
# How far can one trust such tables? MT-NLG is the model of 530 billion again, on 2,240 GPUs with the same layout: its paper
# (arXiv:2201.11990, section 2.4) has 126 TFLOP/s a GPU at a batch of 1,920, the table above 159 at one of 2,240. Two papers
# differ there by more than the planner is off for any mesh in these tables.
#
# Now Llama 3 of 405 billion parameters (table 4 of its paper), on H100s: peak 989 TFLOP/s, 450 GB/s in a node, 50 between,
# 3.35 TB/s of memory.
# Without recomputation, as they had it for 8,192 tokens:

# %%
H100 = Machine(80e9, 989e12, 0.62, 8, 450e9, 50e9, 3.35e12)
rows = []
for run in LLAMA:
    layout = f"dp {run.dp} pp {run.pp} cp {run.cp} tp {run.tp}"
    v = judge(
        run.shape, run.mesh("zero1", recompute=False), H100
    )  # 126 blocks on 16 stages: two have one less
    ours = run.shape.flops(run.batch) / v.step / run.gpus / 1e12
    gb = [f"{v.sent[axis] / 1e9:.0f}" for axis in ("tensor", "context", "pipeline", "data")]
    off = f"{ours / run.tflops - 1:+.0%}"
    rows.append([layout, "/".join(gb), f"{v.bubble:.0%}", run.tflops, f"{ours:.0f}", off])
columns = ["layout", "GB by tp/cp/pp/dp", "bubble", "TFLOP/s a GPU", "planned", "off"]
pd.DataFrame(rows, columns=columns)

# %% [markdown]
# Too pessimistic, and the bubble says why: with 16 stages and 16 or 32 micro-batches plain 1F1B idles a third to a half of
# the step. They interleave (chapter 12), which our planner does not know. The last row has sequences of 131,072 tokens over
# 16 context ranks. To the other axes a rank's part looks like a sequence of 8,192 tokens, so they send what the row above
# sends; cp adds its own.
#
# **DeepSeek-V3** (671 billion parameters, 37 active; 2,048 H800 GPUs) is laid out otherwise: 16 stages with DualPipe, experts
# over 64 GPUs (8 nodes), ZeRO-1, and *no* tensor parallelism (section 3.2 of its report): its activations were made small
# enough to do without. An axis is there to solve a problem; without the problem leave it out.
#
# A recipe, in the order in which those reports argue:
#
# 1. ZeRO-1 (or 3) over data, and recomputation: until a sequence or a layer does not fit, or a rank has too few tokens.
# 2. tp, up to the node.
# 3. pp, as many stages as memory needs, and at least four times as many micro-batches as stages.
# 4. cp, when one sequence's activations still do not fit, or when there are fewer sequences than replicas.
# 5. What is left is dp.

# %% [markdown]
# ## 9. Prove it
#
# - **Exercises:** [exercises/13_three_d](../exercises/13_three_d/exercise.py): `pytest exercises/13_three_d`
# - **Quiz:** `refimpl quiz --topic parallelism`, or `Quiz("parallelism")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [test_context.py](../tests/parallel/test_context.py) (values, gradients, traffic, work,
#   memory), [test_axes.py](../tests/engine/test_axes.py) (any layout trains as one process),
#   [test_mesh.py](../tests/plan/test_mesh.py) (published tables), [test_context.py](../tests/plan/test_context.py).
# - **Code:** [blocks.py](../refimpl/parallel/context/blocks.py), [ring.py](../refimpl/parallel/context/ring.py),
#   [ulysses.py](../refimpl/parallel/context/ulysses.py), [layout.py](../refimpl/parallel/context/layout.py),
#   [mesh.py](../refimpl/comm/mesh.py), [axes.py](../refimpl/comm/axes.py), [cut.py](../refimpl/engine/cut.py),
#   [beyond.py](../refimpl/zero/agreement/beyond.py), [search.py](../refimpl/plan/search.py).
# - **DeepSpeed:**
#   [deepspeed/sequence/layer.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/sequence/layer.py)
#   (Ulysses), [deepspeed/utils/groups.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/groups.py).
# - **Papers:** Liu et al. 2023, [arXiv:2310.01889](https://arxiv.org/abs/2310.01889) (the ring). Milakov and Gimelshein 2018,
#   [arXiv:1805.02867](https://arxiv.org/abs/1805.02867) (the running softmax). Jacobs et al. 2023,
#   [arXiv:2309.14509](https://arxiv.org/abs/2309.14509) (Ulysses). Brandon et al. 2023,
#   [arXiv:2311.09431](https://arxiv.org/abs/2311.09431) (balance). Narayanan et al. 2021,
#   [arXiv:2104.04473](https://arxiv.org/abs/2104.04473) (three dimensions). Llama team 2024,
#   [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), and DeepSeek-AI 2024,
#   [arXiv:2412.19437](https://arxiv.org/abs/2412.19437) (how they did it).
