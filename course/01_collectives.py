# %% [markdown]
# # 1 · Collectives
#
# A collective is a call that all ranks make together. Five of them carry nearly everything in this course (chapter 12
# adds messages between two ranks). In this chapter you see what each one does, build an all-reduce in three shapes
# (ring, tree, two levels), count its bytes, predict its time, and break it.

# %%
# %load_ext refimpl.notebook
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from refimpl import launch
from refimpl.comm import collectives, ring
from refimpl.comm.group import Group
from refimpl.notebook import show

# %% [markdown]
# ## 1. The pain: everything through rank 0
#
# A task: how often does each of the 256 byte values occur in a text? Each of 4 ranks counts a quarter of it. Then the
# counts must be added, and every rank must know the sum. (Replace "counts" by "gradients" and this is data parallel
# training.) The first idea that comes to mind: all send theirs to rank 0, which adds them and sends the sum back.

# %%
# %%ranks 4
from refimpl.model.data import corpus


def through_root(x):
    if rank == 0:
        part = torch.empty_like(x)
        for other in range(1, world_size):
            group.recv(part, source=other)
            x += part
        for other in range(1, world_size):
            group.send(x, to=other)
    else:
        group.send(x, to=0)
        group.recv(x, source=0)


text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
mine = torch.bincount(text.tensor_split(world_size)[rank], minlength=256).float()  # [256]
expected = torch.bincount(text, minlength=256).float()

counts = mine.clone()
through_root(counts)
torch.equal(counts, expected)

# %% [markdown]
# Right. What did it cost? The buffer has 256 fp32 numbers, $n = 1024$ bytes.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "The buffer has 1,024 bytes. How many does rank 0 send?",
    3 * 1024,
    unit="bytes",
    why="The sum, to three others.",
)

# %%
# %%ranks 4
group.ledger.sent_bytes()

# %% [markdown]
# Rank 0 sent three buffers and received three, the others one each way. That gets worse with every rank: all of it
# goes through one process, one after the other, while the rest wait. Bytes that the busiest rank sends, in units
# of $n$:

# %% tags=["hide-input"]
table = pd.DataFrame({"N": [2, 4, 8, 64, 1024]})
table["through rank 0"] = table["N"] - 1
table["ring (below)"] = (2 * (table["N"] - 1) / table["N"]).round(3)
table

# %% [markdown]
# ## 2. The idea: cut the buffer, let all links work at once
#
# Put the ranks in a ring and cut the buffer into $N$ chunks. In each step every rank sends one chunk to its right
# neighbour and receives another from its left one. In the first $N-1$ steps, what arrives is **added**: then each rank
# owns one chunk of the finished sum. In the next $N-1$ steps the finished chunks travel once round, and what arrives is
# **copied**. No rank is special, and no link is ever idle.
#
# Each rank sends $2(N-1)$ messages of $n/N$ bytes. With the price of a message from chapter 0, $\alpha$ seconds and
# $\beta$ more for each byte:
#
# $$\text{bytes sent} = 2n\,\frac{N-1}{N}\qquad\qquad T = 2(N-1)\left(\alpha + \frac{n}{N}\beta\right)$$
#
# The bytes stay below $2n$ for any number of ranks. As long as it is ranks that add, no algorithm sends less. The
# latency is the price: $2(N-1)$ messages one after the other. Here is the ring at work. Each square is a chunk on a
# rank, the number says how many ranks' contributions it holds, and a bold number has just changed.

# %% tags=["hide-input"] alt="Seven grids of ranks by chunks: sums grow along the diagonal, then finished chunks spread"
N = 4
holds = [np.ones((N, N), int)]  # [rank, chunk]: contributions
for step in range(1, 2 * N - 1):
    now = holds[-1].copy()
    for rank in range(N):
        sender = (rank - 1) % N
        chunk = (sender - step) % N if step < N else (sender - (step - N)) % N
        arrived = holds[-1][sender, chunk]
        now[rank, chunk] = now[rank, chunk] + arrived if step < N else arrived
    holds.append(now)

figure, axes = show.figure(3, rows=2, columns=N)
axes[1, N - 1].axis("off")
for step, (axis, held) in enumerate(zip(axes.flat, holds, strict=False)):
    axis.imshow(held, cmap="Greens", vmin=0, vmax=N + 2)
    for (rank, chunk), number in np.ndenumerate(held):
        moved = step and number != holds[step - 1][rank, chunk]
        axis.text(
            chunk, rank, number, ha="center", va="center", weight="bold" if moved else "normal"
        )
    axis.set_title(
        "start" if step == 0 else f"{'add' if step < N else 'copy'} {(step - 1) % (N - 1) + 1}"
    )
    axis.set(xticks=range(N) if step >= N - 1 else [], yticks=range(N) if step % N == 0 else [])
    axis.set(xlabel="chunk" if step >= N - 1 else "", ylabel="rank" if step % N == 0 else "")
plt.show()

# %% [markdown]
# The two halves have names of their own, and uses of their own. The first is a **reduce-scatter**, the second an
# **all-gather**. ZeRO (*Zero Redundancy Optimizer*, chapters 4 to 6) is made of these two.

# %% [markdown]
# ## 3. Build it
#
# First, what each collective does. Rank $r$ begins with $10r, 10r+1, 10r+2, 10r+3$.


# %%
# %%ranks 4
def fresh():
    return torch.arange(4) + 10 * rank


after = {"before": fresh()}

x = fresh()
group.all_reduce(x)  # everyone gets the sum
after["all_reduce"] = x

x, out = fresh(), torch.empty(1, dtype=torch.int64)
group.reduce_scatter(out, x)  # rank r gets chunk r of the sum
after["reduce_scatter"] = out

x, out = fresh()[:1], torch.empty(4, dtype=torch.int64)
group.all_gather(out, x)  # everyone gets everyone's chunk (here: the first number)
after["all_gather"] = out

x, out = fresh(), torch.empty(4, dtype=torch.int64)
group.all_to_all(out, x)  # chunk i goes to rank i: a transposed table
after["all_to_all"] = out

x = fresh()
group.broadcast(x, root=2)  # everyone gets rank 2's
after["broadcast"] = x

# %% tags=["hide-input"]
pd.DataFrame(
    [{name: str(x.tolist()) for name, x in after.items()} for after in ranks.pull("after")],
    index=pd.Index(range(4), name="rank"),
)

# %% [markdown]
# $0 + 10 + 20 + 30 = 60$ is chunk 0 of the sum, and 72 is chunk 3. A reduce-scatter followed by an all-gather is an
# all-reduce:

# %%
# %%ranks 4
whole, chunk = torch.empty(4, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
group.reduce_scatter(chunk, fresh())
group.all_gather(whole, chunk)
torch.equal(whole, after["all_reduce"])

# %% [markdown]
# **Your turn.** Write the body and run the cell: it is saved in your exercise's file and graded on real ranks in a
# second or two. You need two methods: `group.send(x, to, async_op=True)` returns at once with a `work`, whose `wait()`
# returns when the send is over, and `group.recv(x, source)` fills `x`. `%hint 01_collectives ring_reduce_scatter` helps.
# Then read on.


# %%
# %%task 01_collectives ring_reduce_scatter
def ring_reduce_scatter(group: Group, x: Tensor) -> Tensor:
    """x [N*s] on every rank -> [s]: chunk `rank` of the sum over ranks, in memory of its own.

    x must keep its values. Each rank sends to its right neighbour (rank + 1) and receives from
    its left only: N - 1 messages of one chunk, s (N - 1) elements in all. Example with 2 ranks:
    x = [1, 2] on rank 0 and [10, 20] on rank 1 -> [11] and [22].
    """
    raise NotImplementedError("ring_reduce_scatter")


# %% [markdown]
# How can one tell a ring from another reduce-scatter, which gives the same sums? By the ledger. Here are the one of
# refimpl, `ring.reduce_scatter`, and `Group.reduce_scatter`, in which every rank gets its chunk from all others
# directly. What did rank 1 do?

# %%
# %%ranks 4
from refimpl.comm import ring

for name, way in {"ring": ring.reduce_scatter, "direct": type(group).reduce_scatter}.items():
    chunk = torch.empty(1, dtype=torch.int64)
    group.ledger.reset()
    way(group, chunk, fresh())
    calls = [f"{e.op}, {e.sent_bytes} bytes" for e in group.ledger.events if e.phase == "start"]
    if rank == 1:
        print(f"{name}: {chunk.item()} by", *calls, sep="\n  ")

# %% [markdown]
# The same sum and the same 24 bytes: 3 chunks of one 8-byte number. The ring sends them as 3 messages to one
# neighbour, and none of them can leave before the one from the left has come. (So `send` must not wait before `recv`
# has begun: if all ranks waited for their right neighbour first, none would ever receive.) The second half,
# `ring_all_gather`, is in the exercises too; it copies where this half adds.
#
# And the task from the beginning, the byte counts of the text:

# %% tags=["hide-input"]
predict(
    "The same 1,024 bytes through the ring. How many does each rank send?",
    2 * 1024 * 3 / 4,
    unit="bytes",
    why="2n(N-1)/N",
)

# %%
# %%ranks 4
counts = mine.clone()
group.ledger.reset()
ring.all_reduce(group, counts)
print("right:", torch.equal(counts, expected))
group.ledger.sent_bytes()

# %% [markdown]
# $2 \cdot 1024 \cdot \frac34 = 1536$ bytes from each rank, instead of 3072 from one.
#
# **A tree.** For a small buffer the bytes cost nothing, and the ring's $2(N-1)$ messages in a row cost
# $2(N-1)\,\alpha$: on 1024 ranks 2046 of them. A tree needs $2\lceil\log_2 N\rceil$, which is 20. On the way up, half
# of those who still hold a sum hand it to a neighbour in each round; on the way down, all who have the result pass it
# on. Here is the way up. The way down is this chapter's exercise `tree_broadcast`, so the cell borrows the `broadcast`
# that `group` has.


# %% tags=["hide-input"]
predict(
    "A tree over 1,024 ranks. In how many rounds does the sum reach rank 0?",
    10,
    why="It halves the ranks each time.",
)


# %%
def tree_reduce(group, x):
    """The sum over ranks, in rank 0's x. The others' hold partial sums."""
    part, distance = torch.empty_like(x), 1
    while distance < group.size:
        if group.rank % (2 * distance):
            group.send(x, to=group.rank - distance, tag="up")
            return
        if group.rank + distance < group.size:
            group.recv(part, source=group.rank + distance)
            x += part
        distance *= 2


ranks.push(tree_reduce=tree_reduce)

# %%
# %%ranks 4
counts = mine.clone()
group.ledger.reset()
tree_reduce(group, counts)
group.broadcast(counts, root=0)
print(
    "right:",
    torch.equal(counts, expected),
    "| sent on the way up:",
    group.ledger.sent_bytes("tag").get("up", 0),
)

# %% [markdown]
# Every rank but rank 0 sends the whole buffer up once: $n(N-1)$ bytes in all, and as many down. That is as much as
# through rank 0, but in 2 + 2 rounds and by several ranks at once. Who sends what on the way down? gloo's broadcast is
# such a tree (a *binomial* one), and the kernel of Linux counts what a process writes to its sockets (macOS does not:
# `nan`). Here with $n$ = 4 MB:

# %%
# %%ranks 4
import math
import sys
from pathlib import Path

from refimpl.comm.group import Group

tcp, buffer = Group.world(transport="gloo"), torch.ones(2**20)


def written():
    if sys.platform != "linux":
        return math.nan
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


tcp.barrier()
before = written()
tcp.broadcast(buffer)
tcp.barrier()
print(f"wrote {(written() - before) / buffer.nbytes:.1f} n")

# %% [markdown]
# Rank 0 sends it to two, one of those to the last: $2n$, $n$, 0, 0. On $N$ ranks the root sends
# $n\lceil\log_2 N\rceil$, where "through rank 0" sent $n(N-1)$. (The ledger keeps it simple: it charges the root with
# the whole tree, $n(N-1)$.)
#
# **Two levels.** Between two ranks of a node the way is short, between nodes it is long. So sum inside the nodes first.
# Of 4 ranks, let 0 and 1 be one node, 2 and 3 another: a reduce-scatter inside each node, an all-reduce of what each
# holds with its counterpart in the other node, an all-gather inside.

# %%
# %%ranks 4
from refimpl.comm.mesh import Mesh

mesh = Mesh({"node": 2, "local": 2})  # rank = 2 * node + local
inside, between = mesh.group("local"), mesh.group("node")
mesh.ledger.reset()
counts, half = mine.clone(), torch.empty(128)
inside.reduce_scatter(half, counts, tag="inside")
between.all_reduce(half, tag="between nodes")
inside.all_gather(counts, half, tag="inside")
print("right:", torch.equal(counts, expected), mesh.ledger.sent_bytes("tag"))

# %% [markdown]
# Of 1536 bytes a rank, 512 leave the node. The flat ring also crosses between the nodes, by one rank of each (1 to 2
# and 3 to 0), and that rank sends all of its 1536 bytes there. With 8 GPUs a node, each with a network card of its own,
# two levels all-reduce $\frac18$ of the buffer through each card where the one ring sends all of it through one. (NCCL
# therefore runs several rings, each of which leaves the node by another card.)

# %% [markdown]
# ## 4. Read it
#
# The ring of refimpl is in [refimpl/comm/ring.py](../refimpl/comm/ring.py). It also takes buffers that $N$ does not
# divide, and leaves the input of a reduce-scatter as it was. Read it when yours passes: what does it do with the
# partial sums, and why does it need no modulo for `chunks[rank - 1]`?
#
# `Group.all_reduce`, which the rest of the course uses, moves as many bytes in another way. The owner of chunk $i$ gets
# it from all others directly, not by way of its neighbours. (Through TCP these are two all-to-alls, one with the ranks
# below and one with those above, so that the own chunk is not copied. In shared memory the owner reads the chunks where
# they lie.) Then it adds them, in rank order. In the code below `rows[r]` is rank r's copy of the chunk, and the loop
# takes it in blocks that fit into a core's cache:

# %%
show.source(collectives.ordered_reduce)

# %% [markdown]
# ## 5. Measure it
#
# **Bytes.** Every collective at 2, 3 and 4 ranks, on a buffer of $n = 12\,000$ bytes. The ledger counts what rank 0
# sent; of a broadcast, what all ranks send together. Theory and count agree to the byte.

# %%
ways = {
    "all_reduce": lambda n, N: 2 * n * (N - 1) // N,
    "ring all_reduce": lambda n, N: 2 * n * (N - 1) // N,
    "reduce_scatter": lambda n, N: n * (N - 1) // N,
    "all_gather": lambda n, N: n * (N - 1) // N,
    "all_to_all": lambda n, N: n * (N - 1) // N,
    "broadcast, by all ranks": lambda n, N: n * (N - 1),
}


def count():
    group = Group.world()
    full, other = torch.zeros(3000), torch.zeros(3000)
    part = torch.zeros(3000 // group.size)
    calls = [
        lambda: group.all_reduce(full),
        lambda: ring.all_reduce(group, full),
        lambda: group.reduce_scatter(part, full),
        lambda: group.all_gather(full, part),
        lambda: group.all_to_all(other, full),
        lambda: group.broadcast(full),
    ]
    found = []
    for call in calls:
        group.ledger.reset()
        call()
        found.append(sum(group.ledger.sent_bytes().values()))
    return found


formula = {f"{name}, N={N}": way(12_000, N) for N in (2, 3, 4) for name, way in ways.items()}
counts = [number for N in (2, 3, 4) for number in launch.run(count, ranks=N)[0]]
show.compare(formula=formula, counted=dict(zip(formula, counts, strict=True)))

# %% [markdown]
# **Seconds.** First the price of a message on this machine: all ranks send to the right at the same time, four times in
# a row, from 64 bytes to 16 MB. Through the points goes the line $\alpha + n\beta$ that fits best (in relative error,
# so that small messages count as much as large ones). Each size is tried many times and the best time counts: on a
# shared machine the slower ones measure the other programs. Beside it the ring, and the tree with gloo's way down.

# %%
from refimpl.measure.clock import Clock

SIZES = [4**k for k in range(3, 13)]  # 64 bytes to 16 MB


def race():
    """Best seconds on this rank, by size: a message in a row of four, the ring, a tree."""
    group, clock = Group.world(transport="gloo"), Clock()
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for size in SIZES:
        x = torch.zeros(size // 4)
        out = torch.zeros_like(x)
        for _ in range(20 if size < 2**20 else 5):
            group.barrier()
            with clock.time(f"message {size}"):
                for _ in range(4):
                    group.send_recv(x, right, out, left)
            group.barrier()
            with clock.time(f"ring {size}"):
                ring.all_reduce(group, x)
            group.barrier()
            with clock.time(f"tree {size}"):
                tree_reduce(group, x)
                group.broadcast(x)
    best = {name: min(ms) / 1e3 for name, ms in clock.ms.items()}
    fours = {"message": 4, "ring": 1, "tree": 1}
    return {
        way: {size: best[f"{way} {size}"] / many for size in SIZES}
        for way, many in fours.items()
    }


def slowest(found):
    return {
        way: {size: max(of_rank[way][size] for of_rank in found) for size in SIZES}
        for way in found[0]
    }


two, four = (slowest(launch.run(race, ranks=N)) for N in (2, 4))

# %% tags=["nbval-ignore-output"]
import os

from refimpl.plan.time import Link, crossover_bytes, ring_all_reduce_seconds

n, t = np.array(SIZES), np.array([two["message"][size] for size in SIZES])
(alpha, beta), *_ = np.linalg.lstsq(
    np.stack([1 / t, n / t], axis=1), np.ones(len(t)), rcond=None
)
print(
    f"alpha = {1e6 * alpha:.0f} microseconds a message,  1/beta = {1e-9 / beta:.2f} GB/s,  {os.cpu_count()} cores"
)

# %% [markdown]
# Two numbers, and the formula of section 2 predicts the ring for any size and any number of ranks, *if each rank has a
# link of its own*. Ranks on one machine do not. What moves their bytes is the cores, and when $N$ ranks share $C$ cores
# each gets $C/N$ of one: a message takes $s = \max(1, N/C)$ times as long, $\alpha$ and $\beta$ alike. The table has
# the prediction without and with $s$.

# %% tags=["nbval-ignore-output", "hide-input"]


def shared(ranks):
    """The link of one rank when `ranks` of them share this machine's cores."""
    s = max(1, ranks / os.cpu_count())
    return Link(s * alpha, 1 / (s * beta))


rows = []
for N, found in ((2, two), (4, four)):
    for size in (1024, 65_536, 1_048_576, 16_777_216):
        alone, together = (
            ring_all_reduce_seconds(size, N, link)
            for link in (Link(alpha, 1 / beta), shared(N))
        )
        rows.append([N, f"{size:,}", 1e3 * alone, 1e3 * together, 1e3 * found["ring"][size]])
table = pd.DataFrame(
    rows, columns=["N", "bytes", "own link, ms", "shared cores, ms", "measured ms"]
)
table["measured / shared"] = table["measured ms"] / table["shared cores, ms"]
table.round(2)

# %% tags=["nbval-ignore-output", "hide-input"] alt="Time of a message and of a ring all-reduce over size: points measured, lines predicted"
figure, axis = show.figure(4)
line = np.geomspace(64, 16_777_216, 100)
curves = {
    "one message, N=2": (two["message"], alpha + beta * line, "#4c72b0"),
    "ring all-reduce, N=2": (
        two["ring"],
        ring_all_reduce_seconds(line, 2, shared(2)),
        "#dd8452",
    ),
    "ring all-reduce, N=4": (
        four["ring"],
        ring_all_reduce_seconds(line, 4, shared(4)),
        "#55a868",
    ),
}
for label, (measured, predicted, color) in curves.items():
    axis.loglog(line, 1e3 * predicted, color=color, lw=1)
    axis.loglog(SIZES, [1e3 * s for s in measured.values()], "o", color=color, label=label)
axis.loglog(
    line,
    1e3 * ring_all_reduce_seconds(line, 4, Link(alpha, 1 / beta)),
    "--",
    color="#55a868",
    lw=1,
)
axis.set(
    xlabel="bytes",
    ylabel="milliseconds",
    title="Points: measured. Lines: predicted\n(dashed: N=4, links of their own)",
)
axis.legend(frameon=False)
axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Left of the bend a message costs $\alpha$ and its size does not matter. Right of it, time grows with the bytes. This
# is why gradients travel in buckets of megabytes and not one tensor at a time.
#
# Without $s$ the prediction for 4 ranks is several times too low (dashed); with it, the largest buffer is met within a
# half, and small ones can still take several times as long. What is left out is the additions, the memory for what
# arrives, and above all that a rank whose message has come must wait until the system gives it a core again: that can
# take longer than the message, six times in a row, and the more so the busier the machine is. A model of two numbers is
# for choosing between algorithms, not for promising a date. (On a cluster $s$ has other causes: GPUs that share a network
# card, or a switch with fewer links up than down.)
#
# **Ring or tree?** The tree sends the whole buffer in each of its $2\lceil\log_2 N\rceil$ rounds, the ring $1/N$ of it
# in each of $2(N-1)$. So there is a size at which they change places:

# %% tags=["nbval-ignore-output", "hide-input"]
table = pd.DataFrame(
    {
        way: {f"{size:,}": 1e3 * four[way][size] for size in SIZES[::2]}
        for way in ("ring", "tree")
    }
)
table["faster"] = table[["ring", "tree"]].idxmin(axis=1)
print(
    f"by the formula they change places at {crossover_bytes(4, Link(alpha, 1 / beta)):,.0f} bytes"
)
table.round(2).rename_axis("bytes, 4 ranks; ms")

# %% [markdown]
# By the formula 4 ranks win little with a tree: 4 rounds in place of 6. The table says that they win more, because in a
# round of the tree a rank waits for one other, and in a step of the ring all wait for all. On 1024 ranks it is 20 rounds
# in place of 2046, and the formula lets the tree win far into the megabytes. **NCCL**, the library behind collectives on
# NVIDIA's GPUs, asks a model of this kind at every call. The bandwidths are those of the links that it found when it
# started. The latencies stand in its source, by kind of link: a step of a ring costs 3.4 microseconds over NVLink and 14
# over a network (0.6 and 2.7 by LL, its protocol for small messages, which halves the bandwidth).
#
# | NCCL's algorithm for an all-reduce | what it is | when it is taken |
# |---|---|---|
# | Ring | the ring above, chunks cut finer so that steps overlap; several rings at once | large buffers, few nodes |
# | Tree | between nodes two binary trees, half of the buffer in each; who is a leaf in one is a branch in the other. A chain inside a node | small buffers, many nodes |
# | NVLS | the NVLink switch adds what it fetches from all GPUs (Hopper and later) | in a node; NVLSTree goes on between nodes |
# | CollNet | the switches of an InfiniBand network add (SHARP) | where there are such switches |
#
# `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING` prints the choice, `NCCL_ALGO` overrides it. With NVLS and CollNet ranks no
# longer add, so "no algorithm sends less than $2n\frac{N-1}{N}$" does not hold for them. With NVLS a GPU sends
# $n\frac{N+1}{N}$: its buffer, which the switch fetches, and its $N$-th of the sum, which the switch hands to all.

# %% [markdown]
# **The way.** All that was timed so far went through TCP, although all ranks are on one host: messages between two ranks
# always do here, and the tree's `broadcast` was told to (`transport="gloo"`). A collective of `Group` need not: a rank
# can read what its peer has put into memory that both see. A cluster has both kinds of way:
#
# ```mermaid
# flowchart LR
#   subgraph A ["one node"]
#     a0["rank 0"] <-->|"NVLink or shared memory<br/>a peer reads my memory"| a1["rank 1"]
#   end
#   subgraph B ["another node"]
#     b0["rank 2"] <-->|"NVLink or shared memory"| b1["rank 3"]
#   end
#   a1 <-->|"network: InfiniBand, Ethernet<br/>bytes are copied out, sent, copied in"| b0
# ```
#
# An H100 reaches its seven neighbours at 450 GB/s in each direction, and other nodes at 50 GB/s through one 400 Gbit/s
# card, by the makers' figures. NCCL chooses for each pair of ranks, and says so under `NCCL_DEBUG=INFO` (`via P2P`, `via SHM`, `via NET`).
# `Group` does the same for ranks on CPUs: shared memory where all are on one host, else TCP through gloo.
# `REFIMPL_TRANSPORT=gloo` asks for TCP. The algorithm, the bytes in the ledger and the bits are the same. The time is
# not:

# %%
# %%ranks 2
from refimpl.comm.group import Group
from refimpl.measure.clock import Clock

ways = {"TCP": Group.world(transport="gloo"), "shared memory": group}
took, results = {}, []
for size in (4096, 262_144, 16_777_216):
    for name, way in ways.items():
        x, clock = way.empty(size // 4, torch.float32), Clock()
        for _ in range(20):
            x.copy_(torch.arange(size // 4) / (3 + rank))
            group.barrier()
            with clock.time():
                way.all_reduce(x)
        took[size, name] = min(clock.ms["step"])
        results.append(x.clone())
print(
    "the same bits either way:",
    all(torch.equal(a, b) for a, b in zip(results[::2], results[1::2], strict=True)),
)
sent = [way.ledger.sent_bytes()["all_reduce"] for way in ways.values()]
print("bytes in the ledger:     ", *sent)

# %% tags=["nbval-ignore-output", "hide-input"]
took = ranks.pull("took")[0]
table = pd.DataFrame(
    [[f"{s:,}", took[s, "TCP"], took[s, "shared memory"]] for s in sorted({s for s, _ in took})]
)
table.columns = ["bytes", "TCP, ms", "shared memory, ms"]
table["times faster"] = (table["TCP, ms"] / table["shared memory, ms"]).round(1)
table.round(3)

# %% [markdown]
# TCP copies every byte into the kernel and out again, and both copies take time from the cores that compute. In shared
# memory the owner of a chunk adds the others' numbers where they lie. What remains is signals (a word in the same
# memory says "my buffer is complete", another "I have read yours") and one copy of each finished chunk. For that the
# buffer must lie in the shared memory from the start: `Group.empty` hands such memory out, and the stages keep their
# buckets there. A tensor from elsewhere is copied there first.

# %% [markdown]
# **Bits.** In floating point, $(a+b)+c$ need not equal $a+(b+c)$. The ring adds each chunk in another order: it starts
# where the chunk starts. `Group.all_reduce` adds all chunks in rank order. Does it matter? Compare both with one
# process that adds the four contributions one after the other.

# %% tags=["hide-input"]
predict(
    "Is the ring's sum that of one process which adds in rank order, bit for bit?",
    "no",
    options=["yes", "no"],
    why="It adds in another order for each chunk, and every addition rounds.",
)

# %%
# %%ranks 4
from refimpl.comm import ring

x = 1 / (3.0 + 7.0 * torch.arange(100_000) + rank)  # [100000] fp32
contributions = torch.empty(4, 100_000)
group.all_gather(contributions, x)
g0, g1, g2, g3 = contributions
one_process = ((g0 + g1) + g2) + g3

direct, around = x.clone(), x.clone()
group.all_reduce(direct)
ring.all_reduce(group, around)
print("rank order equals one process:", torch.equal(direct, one_process))
print("the ring does:                ", torch.equal(around, one_process))
different = around != one_process
print("by chunk, numbers that differ:", [int(chunk.sum()) for chunk in different.chunk(4)])
print(
    "largest relative difference:   2 **",
    int(((around - one_process).abs() / one_process).max().log2().ceil()),
)

# %% [markdown]
# More than a quarter of the numbers differ, in their last bits. Both sums are right: the difference is rounding. But
# rank order gives something that the ring cannot give: *the bits of one process*. All strategies in this course add in
# rank order. So DDP (chapter 2) and ZeRO-1, 2 and 3 can be compared by `torch.equal`, and no bug can hide below a
# tolerance.
#
# Chunk 3 differs nowhere. The sum of chunk $c$ starts at rank $c+1$, so chunk 3 starts at rank 0 and meets the ranks in
# rank order by accident. The others begin elsewhere: chunk 0 is $((g_1+g_2)+g_3)+g_0$.

# %% [markdown]
# ## 6. Break it
#
# **The wrong partner.** Collectives have no names on the wire. The first call of each rank meets the first call of the
# others, the second the second. Suppose half of the ranks go through their tensors in another order (a `set`, a dict
# filled in another order, hooks that fire when they like). If the sizes differ, the job hangs or fails. If they are
# equal:

# %% tags=["hide-input"]
predict(
    "Two ranks reduce weight, then bias; two bias, then weight. "
    "Both have 3 numbers. What happens?",
    "wrong sums, and no word",
    options=["a hang", "an error", "wrong sums, and no word"],
)

# %%
# %%ranks 4
group.ledger.reset()
gradients = {"weight": torch.full((3,), 1.0), "bias": torch.full((3,), 10.0)}
names = list(gradients) if rank < 2 else list(reversed(gradients))
for name in names:
    group.all_reduce(gradients[name], tag=name)
gradients

# %% [markdown]
# No hang and no error. The sums should be 4 and 40. Both are 22, on every rank, and training goes on with rubbish. How
# to find it: let every rank say what it called, and look for the first place where they do not agree. The ledger
# has the list.

# %%
# %%ranks 4
mine = [(event.op, event.tag) for event in group.ledger.events if event.phase == "start"]
for number, calls in enumerate(zip(*group.all_gather_object(mine), strict=True)):
    if rank == 0 and len(set(calls)) > 1:
        print(
            f"call {number}:",
            *(f"rank {r}: {op} {tag}" for r, (op, tag) in enumerate(calls)),
            sep="\n  ",
        )
        break

# %% [markdown]
# The cure is an order that is the same everywhere by construction, such as that of `model.named_parameters()`. PyTorch
# checks shapes and names of calls under `TORCH_DISTRIBUTED_DEBUG=DETAIL`, but the wrong tensor of the right shape
# passes.
#
# **The early hand.** An asynchronous collective returns at once, and the buffer belongs to it until `wait`. Whoever
# touches it before that gets a wrong sum, some of the time:

# %%
# %%ranks 4
x = torch.ones(4_000_000)
work = group.all_reduce(x, async_op=True)
x[::1000] = 0  # too early: not all of it has been read yet
work.wait()
print("touched before wait, right:", bool((x == 4).all()))

x = torch.ones(4_000_000)
work = group.all_reduce(x, async_op=True)
y = torch.ones(1000).cumsum(0)  # compute something else meanwhile
work.wait()
print("left alone till wait, right:", bool((x == 4).all()))

# %% [markdown]
# How to find this one: make every collective blocking. If the result changes, some buffer was touched too early. In
# training it is the gradient that the next backward writes into while the last one is still on its way. Chapter 2
# overlaps the two, with care.

# %% [markdown]
# ## 7. Prove it
#
# - **Exercises:** [exercises/01_collectives](../exercises/01_collectives): the ring's two halves and the whole ring, the
#   tree's way down, the fit, and the ring's time. `pytest exercises/01_collectives`
# - **Quiz:** `refimpl quiz --topic communication`, or `Quiz("communication")` of `refimpl.notebook` in a cell
# - **Code:** [refimpl/comm/ring.py](../refimpl/comm/ring.py), [refimpl/comm/group.py](../refimpl/comm/group.py),
#   [refimpl/comm/shared.py](../refimpl/comm/shared.py) (the way inside a host),
#   [refimpl/plan/time.py](../refimpl/plan/time.py) (the ring beside the tree).
# - **Tests:** [tests/comm/test_group.py](../tests/comm/test_group.py) compares the ledger with the bytes that the
#   operating system counts.
# - **DeepSpeed:**
#   [deepspeed/comm/comm.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/comm/comm.py).
# - **Paper:** Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2),
#   proves that $2n\frac{N-1}{N}$ is the least.
#
# Next: [data parallel](02_ddp.ipynb), where the buffer is the gradient.
