# %% [markdown]
# # 1 · Collectives
#
# A collective is a call that all ranks make together. Five of them carry everything in this course. In this chapter
# you see what each one does, build an all-reduce by hand, count its bytes, predict its time, and break it.

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

# %%
# %%ranks 4
group.ledger.sent_bytes()

# %% [markdown]
# Rank 0 sent three buffers and received three, the others one each way. That gets worse with every rank: all of it
# goes through one process, one after the other, while the rest wait. Bytes that the busiest rank sends, in units
# of $n$:

# %%
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
# The bytes stay below $2n$ for any number of ranks. No algorithm sends less. The latency is the price: $2(N-1)$ messages
# one after the other. Here is the ring at work. Each square is a chunk on a rank, the number says how many ranks'
# contributions it holds.

# %% alt="Seven grids of ranks by chunks: sums grow along the diagonal, then finished chunks spread"
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

figure, axes = plt.subplots(1, 2 * N - 1, figsize=(11, 2.3), layout="constrained")
for step, (axis, held) in enumerate(zip(axes, holds, strict=True)):
    axis.imshow(held, cmap="Greens", vmin=0, vmax=N + 2)
    for (rank, chunk), number in np.ndenumerate(held):
        moved = step and number != holds[step - 1][rank, chunk]
        axis.text(chunk, rank, number, ha="center", va="center", weight="bold" if moved else "normal")
    axis.set_title("start" if step == 0 else f"{'add' if step < N else 'copy'} {(step - 1) % (N - 1) + 1}")
    axis.set(xticks=range(N), yticks=range(N) if step == 0 else [], xlabel="chunk", ylabel="rank" if step == 0 else "")
plt.show()

# %% [markdown]
# The two halves have names of their own, and uses of their own. The first is a **reduce-scatter**, the second an
# **all-gather**. ZeRO is made of these two.

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

# %%
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
# Now the ring by hand. One step of it: give a chunk to the right, take one from the left. The send must not wait
# before the receive has begun. If all ranks waited for their right neighbour first, none would ever receive.

# %%
# %%ranks 4
right, left = (rank + 1) % world_size, (rank - 1) % world_size


def shift(to_right, from_left):
    sending = group.send(to_right, to=right, async_op=True)
    group.recv(from_left, source=left)
    sending.wait()


def ring_reduce_scatter(chunks):
    arrived = torch.empty_like(chunks[0])
    for step in range(1, world_size):
        shift(chunks[(rank - step) % world_size], arrived)
        chunks[(rank - step - 1) % world_size].add_(arrived)


def ring_all_gather(chunks):
    for step in range(world_size - 1):
        shift(chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size])


x = fresh()
ring_reduce_scatter(x.split(1))
x

# %% [markdown]
# Look at the diagonal: rank $r$ holds chunk $r$ of the sum, 60, 64, 68, 72. The other numbers are partial sums left on
# the way. The all-gather puts the finished ones in their place:

# %%
# %%ranks 4
ring_all_gather(x.split(1))
x

# %% [markdown]
# And the task from the beginning, the byte counts of the text:

# %%
# %%ranks 4
counts = mine.clone()
group.ledger.reset()
ring_reduce_scatter(counts.split(256 // world_size))
ring_all_gather(counts.split(256 // world_size))
print("right:", torch.equal(counts, expected))
group.ledger.sent_bytes()

# %% [markdown]
# $2 \cdot 1024 \cdot \frac34 = 1536$ bytes from each rank, instead of 3072 from one.

# %% [markdown]
# ## 4. Read it
#
# The ring in refimpl is the same loop. It also takes buffers that $N$ does not divide, and leaves the input of a
# reduce-scatter as it was.

# %%
show.source(ring.all_reduce, ring._reduce, ring._gather, ring._shift, docstrings=False)

# %% [markdown]
# `Group.all_reduce`, which the rest of the course uses, moves the same bytes in another way. Each rank hands chunk $i$
# to rank $i$ directly, as in one all-to-all. The owner adds the $N$ chunks, in rank order:

# %%
show.source(collectives.ordered_reduce)

# %% [markdown]
# ## 5. Measure it
#
# **Bytes.** Every collective at 2, 3 and 4 ranks, on a buffer of $n = 12\,000$ bytes. The ledger counts what rank 0
# sent. Theory and count agree to the byte.

# %%
ways = {
    "all_reduce": lambda n, N: 2 * n * (N - 1) // N,
    "ring all_reduce": lambda n, N: 2 * n * (N - 1) // N,
    "reduce_scatter": lambda n, N: n * (N - 1) // N,
    "all_gather": lambda n, N: n * (N - 1) // N,
    "all_to_all": lambda n, N: n * (N - 1) // N,
    "broadcast": lambda n, N: n * (N - 1),
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
# **Seconds.** First the price of a message on this machine. Two ranks send to each other at the same time, as in a step
# of the ring, from 64 bytes to 16 MB. Then the line $\alpha + n\beta$ that fits best (in relative error, so that small
# messages count as much as large ones). Each size is tried many times and the best time counts: on a shared machine the
# slower ones measure the other programs.

# %%
# %%ranks 2
from refimpl.comm import ring
from refimpl.measure.clock import Clock


def best(call, size):
    clock = Clock()
    for _ in range(40 if size < 2**20 else 10):
        group.barrier()
        with clock.time():
            call()
    return min(clock.ms["step"]) / 1e3


def exchange(out, x):
    sending = group.send(x, to=1 - rank, async_op=True)
    group.recv(out, source=1 - rank)
    sending.wait()


message, ring2 = {}, {}
for size in [4**k for k in range(3, 13)]:  # 64 bytes to 16 MB
    x = torch.zeros(size // 4)
    out = torch.zeros_like(x)
    message[size] = best(lambda: exchange(out, x), size)
    ring2[size] = best(lambda: ring.all_reduce(group, x), size)

# %% tags=["nbval-ignore-output"]
from refimpl.plan.time import Link, ring_all_reduce_seconds

message, ring2 = ranks.pull("message")[0], ranks.pull("ring2")[0]
n, t = np.array(list(message)), np.array(list(message.values()))
(alpha, beta), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(t)), rcond=None)
link = Link(alpha, 1 / beta)
print(f"alpha = {1e6 * alpha:.0f} microseconds a message,  1/beta = {1e-9 / beta:.2f} GB/s")

# %% [markdown]
# Two numbers, and now the ring's time can be predicted for any size and any number of ranks. Measure it at 4 ranks
# too and put theory beside it.

# %%
# %%ranks 4
from refimpl.comm import ring
from refimpl.measure.clock import Clock

ring4 = {}
for size in [4**k for k in range(3, 13)]:
    x, clock = torch.zeros(size // 4), Clock()
    for _ in range(40 if size < 2**20 else 10):
        group.barrier()
        with clock.time():
            ring.all_reduce(group, x)
    ring4[size] = min(clock.ms["step"]) / 1e3

# %% tags=["nbval-ignore-output"]
ring4 = ranks.pull("ring4")[0]
rows = [
    [N, f"{size:,}", 1e3 * ring_all_reduce_seconds(size, N, link), 1e3 * seconds[size]]
    for N, seconds in ((2, ring2), (4, ring4))
    for size in (1024, 262_144, 16_777_216)
]
table = pd.DataFrame(rows, columns=["N", "bytes", "predicted ms", "measured ms"])
table["measured / predicted"] = table["measured ms"] / table["predicted ms"]
table.round(2)

# %% tags=["nbval-ignore-output"] alt="Time of a message and of a ring all-reduce over size: points measured, lines predicted"
figure, axis = plt.subplots(figsize=(7.5, 4), layout="constrained")
line = np.geomspace(64, 16_777_216, 100)
curves = {
    "one message": (message, alpha + beta * line, "#4c72b0"),
    "ring all-reduce, N=2": (ring2, ring_all_reduce_seconds(line, 2, link), "#dd8452"),
    "ring all-reduce, N=4": (ring4, ring_all_reduce_seconds(line, 4, link), "#55a868"),
}
for label, (measured, predicted, color) in curves.items():
    axis.loglog(line, 1e3 * predicted, color=color, lw=1)
    axis.loglog(list(measured), [1e3 * s for s in measured.values()], "o", color=color, label=label)
axis.set(
    xlabel="bytes", ylabel="milliseconds", title="Points: measured. Lines: alpha-beta model, fitted to one message"
)
axis.legend(frameon=False)
axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Left of the bend a message costs $\alpha$ and its size does not matter. Right of it, time grows with the bytes. This
# is why gradients travel in buckets of megabytes and not one tensor at a time.
#
# The model knows only links. What it leaves out makes the residual: the additions, the memory for what arrives, and the
# cores. This page was made on a machine with 2. The ranks of $N=2$ have a core each and stay near their line. Those of
# $N=4$ share the two, must take turns in each of the 6 steps, and lie above theirs.

# %% [markdown]
# **The way.** Those ranks did not even send. All of them are on one host, so each read what its peer had put into memory
# that both see. A cluster has both kinds of way:
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
# card. NCCL chooses for each pair of ranks, and says so under `NCCL_DEBUG=INFO` (`via P2P`, `via SHM`, `via NET`).
# `Group` does the same for ranks on CPUs: shared memory where all are on one host, else TCP through gloo.
# `REFIMPL_TRANSPORT=gloo` asks for TCP. The algorithm, the bytes in the ledger and the bits are the same. The time is not:

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
print("the same bits either way:", all(torch.equal(a, b) for a, b in zip(results[::2], results[1::2], strict=True)))
sent = [way.ledger.sent_bytes()["all_reduce"] for way in ways.values()]
print("bytes in the ledger:     ", *sent)

# %% tags=["nbval-ignore-output"]
took = ranks.pull("took")[0]
table = pd.DataFrame([[f"{s:,}", took[s, "TCP"], took[s, "shared memory"]] for s in sorted({s for s, _ in took})])
table.columns = ["bytes", "TCP, ms", "shared memory, ms"]
table["times faster"] = (table["TCP, ms"] / table["shared memory, ms"]).round(1)
table.round(3)

# %% [markdown]
# TCP copies every byte into the kernel and out again, and both copies take time from the cores that compute. In shared
# memory the owner of a chunk adds the others' numbers where they lie. What remains is signals (a word in the same memory
# says "my buffer is complete", another "I have read yours") and one copy of each finished chunk. For that the buffer must
# lie in the shared memory from the start: `Group.empty` hands such memory out, and the stages keep their buckets there.
# A tensor from elsewhere is copied there first.

# %% [markdown]
# **Bits.** In floating point, $(a+b)+c$ need not equal $a+(b+c)$. The ring adds each chunk in another order: it starts
# where the chunk starts. `Group.all_reduce` adds all chunks in rank order. Does it matter? Compare both with one
# process that adds the four contributions one after the other.

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
print("largest relative difference:   2 **", int(((around - one_process).abs() / one_process).max().log2().ceil()))

# %% [markdown]
# More than a quarter of the numbers differ, in their last bits. Both sums are right: the difference is rounding. But
# rank order gives something that the ring cannot give: *the bits of one process*. All strategies in this course add in
# rank order. So DDP, ZeRO-1, 2 and 3 can be compared by `torch.equal`, and no bug can hide below a tolerance.
#
# Chunk 3 differs nowhere. The sum of chunk $c$ starts at rank $c+1$, so chunk 3 starts at rank 0 and meets the ranks in
# rank order by accident. The others begin elsewhere: chunk 0 is $((g_1+g_2)+g_3)+g_0$.

# %% [markdown]
# ## 6. Break it
#
# **The wrong partner.** Collectives have no names on the wire. The first call of each rank meets the first call of the
# others, the second the second. Suppose half of the ranks go through their tensors in another order (a `set`, a dict
# filled in another order, hooks that fire when they like). If the sizes differ, the job hangs or fails. If they are equal:

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
        print(f"call {number}:", *(f"rank {r}: {op} {tag}" for r, (op, tag) in enumerate(calls)), sep="\n  ")
        break

# %% [markdown]
# The cure is an order that is the same everywhere by construction, such as that of `model.named_parameters()`. PyTorch
# checks shapes and names of calls under `TORCH_DISTRIBUTED_DEBUG=DETAIL`, but the wrong tensor of the right shape passes.
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
# - **Exercises:** [exercises/01_collectives](../exercises/01_collectives): the ring's two halves, and the fit.
#   `pytest exercises/01_collectives`
# - **Quiz:** `refimpl quiz --topic communication`
# - **Code:** [refimpl/comm/ring.py](../refimpl/comm/ring.py), [refimpl/comm/group.py](../refimpl/comm/group.py),
#   [refimpl/comm/shared.py](../refimpl/comm/shared.py) (the way inside a host),
#   [refimpl/plan/time.py](../refimpl/plan/time.py) (the ring beside the tree).
# - **Tests:** [tests/comm/test_group.py](../tests/comm/test_group.py) compares the ledger with the bytes that the
#   operating system counts.
# - **DeepSpeed:** [deepspeed/comm/comm.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/comm/comm.py).
# - **Paper:** Patarasu & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2),
#   proves that $2n\frac{N-1}{N}$ is the least.
#
# Next: [data parallel](02_ddp.ipynb), where the buffer is the gradient.
