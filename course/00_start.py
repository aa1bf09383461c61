# %% [markdown]
# # 0 · Ranks, messages and a clock
#
# This chapter starts real processes, lets them talk, measures what the talk costs on this machine, and makes them
# hang on purpose. All later chapters stand on it. You need Python, a little PyTorch, and no GPU.
#
# Every chapter has the same seven parts: the pain, the idea, build it, read it, measure it, break it, prove it.

# %% [markdown]
# ## 1. The pain: a model is more than its weights
#
# Take a small GPT that reads text byte by byte. Train it for one step with AdamW, in this one process, and count
# what is in memory afterwards. `MemoryMeter` counts live storages. It knows no formula.

# %%
import torch

from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig

torch.manual_seed(0)
text = corpus()  # the Python language reference: English that every Python carries
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
        "optimizer": [v for state in optimizer.state.values() for v in state.values() if v.numel() > 1],
    }


psi = sum(p.numel() for p in model.parameters())
counted = MemoryMeter(owned).now()
rows = {name: [counted[name], counted[name] / psi] for name in owned()}
rows["all"] = [sum(counted.values()), sum(counted.values()) / psi]
pd.DataFrame.from_dict(rows, orient="index", columns=["bytes", "bytes per parameter"])

# %% [markdown]
# Sixteen bytes for each parameter: 4 for the weight, 4 for its gradient, 8 for the two running means that Adam keeps.
# The literature calls the number of parameters $\Psi$ (psi), so this is $16\Psi$. Put larger models into it:

# %%
GPU = 80e9  # bytes of memory of one large GPU
sizes = {"this one": psi, "GPT-2 XL": 1.5e9, "a 7B model": 7e9, "a 70B model": 70e9}
pd.DataFrame(
    [[f"{n:.2g}", f"{16 * n / 1e9:.4g}", f"{16 * n / GPU:.2g}"] for n in sizes.values()],
    index=list(sizes),
    columns=["parameters", "GB in training", "GPUs of 80 GB"],
)

# %% [markdown]
# A 7B model needs more than one GPU before it has read its first word, and the activations (what forward keeps for
# backward) come on top. More GPUs means more processes, and processes share nothing. The whole course is about what
# they must tell each other, and when.

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
# seconds: $\alpha$ (alpha) for a message however small, $\beta$ (beta) for each byte. Its inverse $1/\beta$ is the
# bandwidth. Both get measured below.

# %% [markdown]
# ## 3. Build it
#
# `launch.run(fn, ranks=N)` starts N processes, calls `fn` on each, and gives back the N results in rank order.

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
# empty. Nothing is shared.
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
# Each rank has the names `rank`, `world_size`, `torch`, `dist` and `group`, and keeps its variables for the next cell.
# Equal outputs are shown once:

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

# %%
# %%ranks 4
group.all_reduce(x)
x

# %% [markdown]
# $0 + 10 + 20 + 30$, and the same on every rank. That one call is nearly all of data parallel training: every rank
# computes gradients on its own text, and then they add them up.

# %% [markdown]
# ## 4. Read it
#
# How does the launcher work? The call is short. The processes are forked from a server that has imported torch
# already, so a world starts in a fraction of a second.

# %%
from refimpl.notebook import show

show.source(launch.run)

# %% [markdown]
# On the other side, a rank joins the process group and then does what its caller sends, until told to leave. It
# watches a pipe that closes when its caller ends, so no rank outlives the notebook.

# %%
from refimpl.ranks.rank import Rank

show.source(Rank.run, Rank._die_with_caller)

# %% [markdown]
# ## 5. Measure it
#
# First what can be known without a clock. `group.ledger` writes down every collective with the bytes that this rank
# sent. For an all-reduce of $n$ bytes on $N$ ranks the formula says $2n\frac{N-1}{N}$. Chapter 1 derives it.

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
# They agree to the byte. Now the clock. Four things, each repeated, the median taken:
# copy 64 MB in memory, multiply two 512 x 512 matrices, all-reduce 8 MB, and all-reduce a single number.
# The numbers depend on the machine and on what else it does. Look at their ratios.

# %%
# %%ranks 2
from refimpl.measure.clock import Clock

clock = Clock(warmup=2)
a, b, m = torch.ones(16_000_000), torch.empty(16_000_000), torch.rand(512, 512)
big, one = torch.zeros(2_000_000), torch.zeros(1)
for _ in range(12):
    group.barrier()  # start together
    with clock.time("copy"):
        b.copy_(a)
    with clock.time("matmul"):
        m @ m
    group.barrier()
    with clock.time("all_reduce big"):
        group.all_reduce(big)
    group.barrier()
    with clock.time("all_reduce one"):
        group.all_reduce(one)

# %% tags=["nbval-ignore-output"]
found = ranks.pull("{name: clock.median(name) for name in clock.ms}")
ms = {name: max(medians[name] for medians in found) for name in found[0]}  # the slower rank's
work = {
    "copy": ("MB read or written", 2 * 64),
    "matmul": ("million operations", 2 * 512**3 / 1e6),  # a multiplication and an addition each
    "all_reduce big": ("MB sent", 2 * 8 * (2 - 1) / 2),
    "all_reduce one": ("MB sent", 4e-6),
}
per_ms = {name: amount / ms[name] for name, (_, amount) in work.items()}
rows = [[unit, f"{amount:.6g}", f"{ms[name]:.3f}", f"{per_ms[name]:.3g}"] for name, (unit, amount) in work.items()]
pd.DataFrame(rows, index=list(work), columns=["unit", "amount", "milliseconds", "amount in 1 ms"])

# %% tags=["nbval-ignore-output"] alt="Bars: operations, bytes copied and bytes sent in 1 ms"
import matplotlib.pyplot as plt

bars = {
    "bytes sent, 4 at a time": per_ms["all_reduce one"] * 1e6,
    "bytes sent, 8 million at a time": per_ms["all_reduce big"] * 1e6,
    "bytes read or written in memory": per_ms["copy"] * 1e6,
    "operations of a matmul": per_ms["matmul"] * 1e6,
}
figure, axis = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
drawn = axis.barh(list(bars), list(bars.values()), color=["#c44e52", "#dd8452", "#4c72b0", "#55a868"])
axis.bar_label(drawn, [f"{value:,.0f}" for value in bars.values()], padding=4)
axis.set(xscale="log", xlim=(1, max(bars.values()) * 30), title="What one millisecond buys here, on each of 2 ranks")
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Computing is cheapest, memory comes next, and messages are dearest: a byte sent costs many times a byte read. And a
# single number costs nearly as much as thousands of them: that fixed price is $\alpha$. On GPUs all numbers are larger
# and the order is the same. So: send few bytes, in large messages, while something else computes. Each later chapter
# is one of these three.

# %% [markdown]
# ## 6. Break it: a hang, and how to read it
#
# A collective ends when all ranks have called it. If one does not, the others wait. There is no error, the fans
# keep spinning, and the job does nothing until someone looks. It is the most common bug of distributed training, and
# this is its most common form: a collective inside an `if` that not every rank takes. Here only rank 0 wants to
# know the mean loss.


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
# the signature. Next to it stands the line to mend: the collective must leave the `if`. The `print` may stay.


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
# the process group's timeout ends the job: `py-spy dump --pid` shows the stack of a rank. The question is the same. Who
# waits in which collective, on which line, and who is not there?

# %% [markdown]
# ## 7. Prove it
#
# - **Quiz:** `refimpl quiz --topic basics`
# - **Tests behind this chapter:** [tests/test_launch.py](../tests/test_launch.py) starts, starves, kills and hangs real
#   processes.
# - **Code:** [refimpl/launch.py](../refimpl/launch.py), [refimpl/ranks/hang.py](../refimpl/ranks/hang.py) (how a stack
#   becomes "waits in all_reduce"), [refimpl/measure/ledger.py](../refimpl/measure/ledger.py).
# - **DeepSpeed:** its launcher is
#   [deepspeed/launcher/launch.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/launcher/launch.py).
#   It starts a process a GPU and sets `RANK` and `WORLD_SIZE`, as `torchrun` does.
# - **Paper:** the 16 bytes per parameter are section 3.1 of Rajbhandari et al. 2020,
#   [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), for fp32 instead of mixed precision (where they are 16 too:
#   2 + 2 + 12).
#
# Next: [the collectives](01_collectives.ipynb), what each one does and what it must cost.
