# %% [markdown]
# # 0 · Ranks, messages and a clock
#
# This chapter starts real processes, lets them talk, measures what the talk costs on this machine, and makes them
# hang on purpose. All later chapters stand on it. You need Python, a little PyTorch, and no GPU.
#
# Every chapter has the same seven parts: the pain, the idea, build it, read it, measure it, break it, prove it. Cells
# that only ask, draw or tabulate are folded; a click opens their code.

# %% [markdown]
# ## 1. The pain: a model is more than its weights
#
# Take a small GPT that reads text byte by byte. Train it for one step with AdamW, in this one process, and count
# what is in memory afterwards. `MemoryMeter` adds up the blocks of memory behind these tensors (torch calls them
# storages), each block once. It knows no formula.

# %%
import torch

from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig

torch.manual_seed(0)
text = corpus()  # the Python language reference, in English
batches = Batches(text, context=64, size=4)
model = GPT(GPTConfig(context=64, width=128, layers=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

tokens, targets = batches.batch(step=0, micro=0)
model(tokens, targets).backward()
optimizer.step()

# %%
import pandas as pd


def owned():
    return {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": [
            v for state in optimizer.state.values() for v in state.values() if v.numel() > 1
        ],
    }


psi = sum(p.numel() for p in model.parameters())
counted = MemoryMeter(owned).now()
rows = {name: [counted[name], counted[name] / psi] for name in owned()}
rows["all"] = [sum(counted.values()), sum(counted.values()) / psi]
pd.DataFrame.from_dict(rows, orient="index", columns=["bytes", "bytes per parameter"])

# %% [markdown]
# Sixteen bytes for each parameter: 4 for the weight (a number in fp32, torch's default, has 32 bits), 4 for its
# gradient, 8 for the two running means that Adam keeps, of the gradient and of its square. (`numel() > 1` leaves out
# Adam's step counters, one number a tensor.) The literature calls the number of parameters $\Psi$ (psi), so this is
# $16\Psi$. Put larger models into it:

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "A model of 7 billion parameters, trained in fp32 with AdamW. How many GB?",
    16 * 7,
    unit="GB",
)

# %% tags=["hide-input"]
GPU = 80e9  # bytes of memory of one large GPU
sizes = {"this one": psi, "GPT-2 XL": 1.5e9, "a 7B model": 7e9, "a 70B model": 70e9}
pd.DataFrame(
    [[f"{n:.2g}", f"{16 * n / 1e9:.4g}", f"{16 * n / GPU:.2g}"] for n in sizes.values()],
    index=list(sizes),
    columns=["parameters", "GB in training", "GPUs of 80 GB"],
)

# %% [markdown]
# For these three alone a 7B model in training needs more than one such GPU, and the activations (what forward keeps for
# backward) come on top. More GPUs means more processes, one for each GPU, and processes do not see each other's
# variables. The whole course is about what they must tell each other, and when.

# %% [markdown]
# ## 2. The idea: a rank is a process, and talking has a price
#
# A **rank** is one process of the job. The **world size** $N$ is how many there are. Each rank runs the same program,
# has its own memory, and differs from the others only in its number. What one rank must know of another travels in a
# message.
#
# ```mermaid
# flowchart LR
#   subgraph A["rank 0"]
#     a["its own x"]
#   end
#   subgraph B["rank 1"]
#     b["its own x"]
#   end
#   subgraph C["rank 2"]
#     c["its own x"]
#   end
#   subgraph D["rank 3"]
#     d["its own x"]
#   end
#   A <-->|messages| B
#   B <-->|messages| C
#   C <-->|messages| D
#   D <-->|messages| A
# ```
#
# A message of $n$ bytes takes
#
# $$T(n) = \alpha + n\,\beta$$
#
# seconds: $\alpha$ (alpha) for a message however small, $\beta$ (beta) for each byte. The inverse $1/\beta$ is the
# bandwidth, in bytes a second. Both get measured below.

# %% [markdown]
# ## 3. Build it
#
# `launch.run(fn, ranks=N)` starts N processes, calls `fn` on each, and gives back the N results in rank order.

# %% tags=["hide-input"]
predict(
    "A function appends once to the list `seen`, on 4 ranks. How long is this notebook's own "
    "`seen` afterwards?",
    0,
    why="Each rank appended to a copy of its own: processes share no variables.",
)

# %%
import os

import torch.distributed as dist

from refimpl import launch

seen = []


def who():
    seen.append("I was here")
    return dist.get_rank(), os.getpid(), len(seen)


results = launch.run(who, ranks=4)
print("ranks:               ", [rank for rank, _, _ in results])
print("different processes: ", len({pid for _, pid, _ in results} | {os.getpid()}) - 1)
print("each rank's list has:", [length for _, _, length in results])
print("this notebook's has: ", len(seen))

# %% [markdown]
# Four new processes, none of them this notebook's. Each appended to its own copy of `seen`, and the copy here stayed
# empty. No variable is shared.
#
# `run` starts afresh each time. For a notebook it is handier to have ranks that stay. That is the magic `%%ranks`:
# the cell below runs on 4 processes, and its last expression is shown with the rank that computed it.

# %%
# %load_ext refimpl.notebook

# %%
# %%ranks 4
x = torch.tensor([10.0 * rank])
x

# %% [markdown]
# Each rank has the names `rank`, `world_size`, `torch`, `dist` (`torch.distributed`) and `group` (refimpl's handle on
# all ranks, whose methods send messages), and keeps its variables for the next cell. Equal outputs are shown once:

# %%
# %%ranks 4
print("there are", world_size, "of us")
x.shape

# %% [markdown]
# `ranks.pull` brings a value from all ranks into the notebook, and `ranks.push` sets one on all.

# %%
ranks.push(step=3)
ranks.pull("(rank, step * x.item())")

# %% [markdown]
# Now the first message. Rank 0 sends its tensor, rank 3 receives it. `--only` leaves the others out of the cell.

# %%
# %%ranks 4 --only 0,3
letter = torch.arange(3.0) if rank == 0 else torch.zeros(3)
if rank == 0:
    group.send(letter, to=3)
else:
    group.recv(letter, source=0)
letter

# %% [markdown]
# And the first **collective**: a call that every rank of the group makes, and in which all of them take part.
# `all_reduce` replaces each rank's tensor by the sum over all ranks.

# %% tags=["hide-input"]
predict(
    "Rank r of 4 holds 10 r. What does rank 2 hold after an all-reduce?",
    0 + 10 + 20 + 30,
    why="The sum, as every other rank does.",
)

# %%
# %%ranks 4
group.all_reduce(x)
x

# %% [markdown]
# $0 + 10 + 20 + 30$, and the same on every rank. That one call is nearly all of data parallel training: every rank
# computes gradients on its own text, and then they add them up.

# %% [markdown]
# ## 4. Read it: who carries the bytes
#
# Real jobs run on many machines. A **node** is one machine, mostly with 8 GPUs and a process for each. A launcher such
# as `torchrun` starts the processes and tells each one its place by environment variables: `RANK` (0 to $N-1$ in the
# whole job), `LOCAL_RANK` (0 to 7 on its node: which GPU is mine), `WORLD_SIZE`, and the address of rank 0
# (`MASTER_ADDR` and `MASTER_PORT`), where all of them meet. In this notebook all ranks are on one node.
#
# Ranks that make collectives together form a **process group**, and the library that moves its bytes is its **backend**:
# **NCCL** between NVIDIA's GPUs, **gloo** between CPUs, through TCP. Code that calls `all_reduce` looks alike on both. In
# refimpl the tensors' device decides:

# %%
from refimpl.comm import process_group
from refimpl.notebook import show

show.source(process_group.backend_of)

# %%
# %%ranks 4
print(
    "torch's group:",
    dist.get_backend(),
    "| for tensors on",
    group.device,
    "this library:",
    group.backend,
)
print(
    "and where all ranks are on one host, memory that they share:",
    type(group.transport).__name__,
)

# %% [markdown]
# How fast depends on the **topology**: which link is between two ranks. The table has usual links of a GPU server, as
# their makers state them, in one direction. (For NVLink 4 and PCIe 5 they mostly state both directions together, 900
# and 128 GB/s.) The last column is the time of one all-reduce over that link: the gradients of a 7B model in 16 bits
# are a buffer of $n$ = 14 GB, of which each rank sends nearly $2n$ bytes, as section 5 shows.

# %% tags=["hide-input"]
GB_A_SECOND = {
    "NVLink 4, GPUs of a node": 450,
    "PCIe 5 x16, GPU and CPU": 63,
    "InfiniBand NDR, 400 Gbit/s, nodes": 50,
    "Ethernet, 100 Gbit/s, nodes": 12.5,
    "Ethernet, 10 Gbit/s, nodes": 1.25,
}
gradients = 7e9 * 2  # bytes
pd.DataFrame(
    {
        "GB/s": GB_A_SECOND,
        "all-reduce, s": {
            link: round(2 * gradients / 1e9 / v, 2) for link, v in GB_A_SECOND.items()
        },
    }
).sort_values("GB/s", ascending=False)

# %% [markdown]
# Inside a node a link is 9 times as fast as between nodes, and a slow network makes it 360 times. That is why groups
# that send much are put inside a node. (Nobody reaches line rates. NCCL itself reckons with 20.6 of the 25 GB/s that
# each of an H100's 18 NVLinks is said to do, 371 GB/s in all, and a ring comes to about that.)

# %% [markdown]
# ## 5. Measure it
#
# First what can be known without a clock. `group.ledger` writes down every collective with the bytes that this rank
# sent. For an all-reduce of $n$ bytes on $N$ ranks the formula says $2n\frac{N-1}{N}$: nearly $2n$ when $N$ is large.
# Chapter 1 derives it.

# %% tags=["hide-input"]
predict(
    "An all-reduce of 4 MB on 4 ranks. How much does each rank send?",
    2 * 4 * (4 - 1) / 4,
    unit="MB",
    why="Three quarters of the buffer on the way to the sum, and three quarters on the way back.",
)

# %%
# %%ranks 4
group.ledger.reset()
for size in (1_000, 1_000_000):  # elements of 4 bytes
    group.all_reduce(torch.ones(size), tag=f"{size} floats")

# %%
n_bytes = {"1000 floats": 4_000, "1000000 floats": 4_000_000}
show.compare(
    formula={name: 2 * n * (4 - 1) // 4 for name, n in n_bytes.items()},
    counted=ranks.pull('group.ledger.sent_bytes(by="tag")')[0],
)

# %% [markdown]
# They agree to the byte. Now the clock: what does an operation cost, what a byte of memory, what a byte sent? Times
# depend on the machine and on what else it does; look at their ratios. (`group.barrier()` is a collective that carries
# nothing: no rank goes on before all have come.)

# %%
# %%ranks 2
from refimpl.measure.clock import Clock

clock = Clock(warmup=2)
a, b = torch.ones(16_000_000), torch.empty(16_000_000)
square = {m: torch.rand(m, m) for m in (16, 64, 256, 512)}
big, one = torch.zeros(2_000_000), torch.zeros(1)
for _ in range(12):
    group.barrier()  # start together
    with clock.time("add"):
        torch.add(a, a, out=b)
    for m, x in square.items():
        with clock.time(f"matmul {m}"):
            x @ x
    group.barrier()
    with clock.time("all_reduce 8 MB"):
        group.all_reduce(big)
    group.barrier()
    with clock.time("all_reduce 4 B"):
        group.all_reduce(one)
    with clock.time("20 in a row"):
        for _ in range(20):
            group.all_reduce(one)

# %% [markdown]
# Computing needs data, so an operation alone says little. What counts is how many operations are done with each byte
# that is moved: the **arithmetic intensity**. Adding two tensors does 1 operation for 12 bytes (reads 8, writes 4). A
# product of two $m \times m$ matrices does $2m^3$ for $12m^2$ bytes, if each number moves once: $m/6$. The table has
# both, and the GB/s at which the bytes moved.

# %% tags=["nbval-ignore-output", "hide-input"]
best = ranks.pull("{name: min(times) for name, times in clock.ms.items()}")[0]
work = {"add": (16e6, 12 * 16e6)} | {
    f"matmul {m}": (2 * m**3, 12 * m**2) for m in (16, 64, 256, 512)
}
rows = [
    [ops / n, best[name], ops / best[name] / 1e6, n / best[name] / 1e6]
    for name, (ops, n) in work.items()
]
columns = ["operations a byte", "ms", "billion operations/s", "GB/s"]
roof = pd.DataFrame(rows, index=list(work), columns=columns)
roof.map("{:.3g}".format)

# %% tags=["nbval-ignore-output", "hide-input"] alt="Roofline: operations a second over operations a byte, a slope and then a ceiling"
import matplotlib.pyplot as plt

peak, memory = roof["billion operations/s"].max(), roof.loc["add", "GB/s"]
network = 8e6 / best["all_reduce 8 MB"] / 1e6  # GB/s: 2n(N-1)/N bytes, N = 2
x = pd.Series(sorted([0.05, peak / memory, peak / network, 1000]))
figure, axis = show.figure(3.4)
for speed, label, colour in (
    (memory, "bytes of memory", "#4c72b0"),
    (network, "bytes sent", "#c44e52"),
):
    axis.loglog(
        x, (x * speed).clip(upper=peak), color=colour, label=f"{label}, {speed:.2g} GB/s"
    )
axis.loglog(roof["operations a byte"], roof["billion operations/s"], "o", color="#4c72b0")
axis.set(
    xlabel="operations a byte",
    ylabel="billion operations a second",
    title="Roofline of one rank, measured",
)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# This is a **roofline**. The dots are the table's operations, and the blue line is drawn through the addition (the slope)
# and the fastest product (the ceiling). Left, where few operations use a byte, memory decides; right, the arithmetic.
# The corner is the machine's balance: what lies left of it is *memory-bound*, such as every element-wise operation and
# AdamW; what lies right is *compute-bound*, such as a large product. (A small product lies under its roof: the call
# itself takes longer than the work.)
#
# Sending has a roof of its own (red), further right, because a byte sent costs more than a byte read. Where does
# training stand under it? For each token a step does about $6\Psi$ operations: in forward every weight is multiplied
# and its product added, which is 2, and backward does 4. It sends nearly $2\Psi b$ bytes, if a gradient has $b$ bytes.
# That is $3T/b$ operations for each byte sent, with $T$ tokens a rank. So the more tokens a rank reads in a step, the
# less the network matters. From how many tokens on does a step compute longer than it sends? Here for gradients of 2
# bytes and NVIDIA's H100 at its full speed in bf16 (a format of 16 bits, chapter 3):

# %% tags=["hide-input"]
CARDS = {
    "H100, NVLink": (990e12, 450e9),
    "H100, InfiniBand": (990e12, 50e9),
}  # operations/s in bf16, bytes/s
pd.DataFrame(
    {
        name: {
            "operations in the time of a byte": round(speed / link),
            "tokens a rank and step to be even": round(speed / link * 2 / 3),
        }
        for name, (speed, link) in CARDS.items()
    }
)

# %% [markdown]
# And the fixed price $\alpha$. A collective takes as long as its slowest rank, which is called a **straggler**, so here
# the slower rank's median counts:

# %% tags=["nbval-ignore-output", "hide-input"]
medians = ranks.pull("{name: clock.median(name) for name in clock.ms}")
us = {name: 1e3 * max(of_rank[name] for of_rank in medians) for name in best}
print(f"all-reduce of one number, after a barrier: {us['all_reduce 4 B']:.0f} microseconds")
print(f"the same 20 times in a row, each:          {us['20 in a row'] / 20:.0f} microseconds")
print(f"all-reduce of 2 million numbers:           {us['all_reduce 8 MB']:.0f} microseconds")

# %% [markdown]
# Two million numbers cost only a few times what one costs: that is $\alpha$. And there is no *one* $\alpha$: in a row,
# both ranks are awake and waiting; after other work one of them is late, or asleep. Chapter 1 fits $\alpha$ to the best
# of many messages in a row, as one does to compare algorithms. A collective in a training step comes after other work,
# and pays the larger price.
#
# So: send few bytes, in large messages, while something else computes. The course does these three again and again: few
# bytes (the ring in chapter 1, 16 bits in chapter 3), large messages (the buckets of chapter 2), meanwhile (overlap in
# chapter 2, prefetch in chapter 6).

# %% [markdown]
# ## 6. Break it: a hang, and how to read it
#
# A rank's collective ends when the ranks that it needs have called it too. If one does not, the others wait. There is
# no error, the fans keep spinning, and nothing is computed until somebody looks, or until a timeout kills the job
# (torch waits 10 minutes for NCCL and 30 for gloo, by default). The usual form of this bug is a collective inside an
# `if` that not every rank takes. Here only rank 0 wants to know the mean loss.


# %% tags=["hide-input"]
predict(
    "Rank 0 alone calls one collective more than the others. What happens?",
    "ranks wait for ever",
    options=["an error on rank 0", "ranks wait for ever", "rank 0 gets its own value back"],
)


# %% tags=["raises-exception"]
# %%ranks 4 --timeout 3
def log(loss):
    if rank == 0:
        group.all_reduce(loss, "mean")
        print(loss)


log(torch.tensor([2.5 + rank]))
group.barrier()

# %% [markdown]
# After 3 seconds `%%ranks` asked each rank where it stands, and stopped them all. Read it from the bottom: ranks 1 to
# 3 are at the barrier, rank 0 is still inside `all_reduce`, **two different collectives at the same time**. That is
# the signature. Next to it stands the line to mend: the collective must leave the `if`. The `print` may stay. (On NCCL
# the same bug can look otherwise. Its barrier is itself an all-reduce of one number, so rank 0's call may meet the
# others' barrier and return. Then rank 0 is one call behind for the rest of the job, until something hangs.)


# %%
# %%ranks 4
def log(loss):
    group.all_reduce(loss, "mean")
    if rank == 0:
        print(loss)


log(torch.tensor([2.5 + rank]))
group.barrier()

# %% [markdown]
# The ranks are new: those of the hang were stopped, and their variables went with them.
#
# A rank that raises is the other common end. The rest would wait for it for ever, or die of a lost connection and
# bury the cause under their own tracebacks. Here the first error is the only one you see:

# %% tags=["raises-exception"]
# %%ranks 4
shards = [torch.ones(4), torch.ones(4), torch.ones(4)]  # one too few
group.all_reduce(shards[rank])

# %% [markdown]
# Outside of notebooks, `launch.run` gives the same reports. In a job under `torchrun` you have to look yourself, before
# the process group's timeout ends the job: `py-spy dump --pid` shows the stack of a rank. With NCCL, torch's **flight
# recorder** keeps each rank's last 2000 collectives and writes them to a file when the timeout comes. (Torch 2.13 does
# so by itself. Older versions want `TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1`; the first is
# called `TORCH_FR_BUFFER_SIZE` now.) The question is the same. Who waits in which collective, on which line, and who is
# not there?

# %% [markdown]
# ## 7. Prove it
#
# - **Quiz:** `refimpl quiz --topic basics`, or `Quiz("basics")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/test_launch.py](../tests/test_launch.py) starts, starves, kills and hangs real
#   processes.
# - **Code:** [refimpl/launch.py](../refimpl/launch.py) (starts ranks, forked from a server that has imported torch
#   already), [refimpl/ranks/rank.py](../refimpl/ranks/rank.py) (what runs on the other side),
#   [refimpl/ranks/hang.py](../refimpl/ranks/hang.py) (how a stack becomes "waits in all_reduce"),
#   [refimpl/measure/ledger.py](../refimpl/measure/ledger.py).
# - **DeepSpeed**, Microsoft's library that ZeRO comes from and that this course builds anew: its launcher is
#   [deepspeed/launcher/launch.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/launcher/launch.py).
#   It starts a process a GPU and sets `RANK` and `WORLD_SIZE`, as `torchrun` does.
# - **Paper:** section 3.1 of Rajbhandari et al. 2020, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), counts the
#   bytes per parameter in mixed precision (chapter 3). They are 16 there too: 2 + 2 + 12.
#
# Next: [the collectives](01_collectives.ipynb), what each one does and what it must cost.
