# %% [markdown]
# # 12 · Pipelines: pass micro-batches on, not weights
#
# ZeRO cuts every tensor into N pieces and sends *weights* to where the data is. A pipeline leaves the weights where
# they are: each rank has some of the layers, a **stage** (no relative of ZeRO's stages), and sends *activations* to the
# next rank. This chapter counts what that saves, why ranks stand idle, and how an order of work, a table and nothing
# else, takes the idle time away. You need chapters 01, 04 and 07.

# %% [markdown]
# ## 1. The pain: layers that are elsewhere
#
# A model of 70 billion parameters, width 8192, in bf16, too large for one GPU. With ZeRO-3 every rank gathers all
# weights for each micro-batch, once for forward and once for backward. If the layers lie on different ranks instead, one
# activation crosses each border between them, and its gradient comes back. Bytes that a rank receives for a micro-batch
# of one sequence:

# %%
# %load_ext refimpl.notebook

# %%
import pandas as pd

parameters, width, itemsize = 70e9, 8192, 2
rows = {}
for tokens in (2048, 8192, 32768):
    gathered = 2 * parameters * itemsize
    crossing = 2 * tokens * width * itemsize
    rows[f"{tokens:,} tokens"] = [
        f"{gathered / 1e9:.0f}",
        f"{crossing / 1e9:.3f}",
        f"{gathered / crossing:,.0f}",
    ]
pd.DataFrame.from_dict(rows, orient="index", columns=["weights, GB", "border, GB", "times"])

# %% [markdown]
# (That is one micro-batch. In a whole step a stage passes on the micro-batches of all $p$ ranks, and a ZeRO-3 rank
# gathers for its own alone: divide by $p$. With 16 stages, 65 times are left at 8,192 tokens.) That is why pipelines
# run *between* nodes, where links are slow. And now the price. Four ranks, a quarter of the layers on each, train on
# one batch. This machine may have fewer cores than ranks, so a stage here multiplies a little and then sleeps, 10 ms in
# forward and 20 in backward, as if a GPU computed meanwhile: a rank that sleeps is busy. Every rank writes down when it
# was.

# %%
# %%ranks 4
import time

import torch
from torch import nn

from refimpl.parallel.pipeline.runner import Pipeline
from refimpl.parallel.pipeline.schedules.named import schedule

WIDTH = 16
spans = []  # (begin, end) of this rank's work


def busy(seconds):
    begin = time.monotonic()
    time.sleep(seconds)
    spans.append((begin, time.monotonic()))


class Takes(torch.autograd.Function):
    """x as it is after 10 ms; its gradient after 20."""

    @staticmethod
    def forward(ctx, x):
        busy(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        busy(0.02)
        return grad


def measured(name, micro_batches):
    """Most ranks that compute at a time, and the share of the step that a rank idles on average."""
    layer = nn.Linear(WIDTH, WIDTH)
    stages = {rank: lambda x: Takes.apply(layer(x))}
    table = schedule(name, group.size, micro_batches)
    pipeline = Pipeline(table, stages, group, lambda y, target: (y - target).square().mean())
    data = [torch.ones(8, WIDTH)] * micro_batches
    pipeline.run(data, data)  # once to agree on shapes
    spans.clear()
    group.barrier()
    pipeline.run(data, data)
    every = [span for ours in group.all_gather_object(spans) for span in ours]
    most = max(sum(a <= begin < b for a, b in every) for begin, _ in every)
    step = max(b for _, b in every) - min(a for a, _ in every)
    return most, 1 - sum(b - a for a, b in every) / step / group.size


most, idle = measured("gpipe", 1)
if rank == 0:
    print(f"at most {most} of {group.size} ranks computes at a time")

# %% [markdown]
# Layer after layer, so rank after rank: 3 of 4 GPUs wait at any moment, however fast they are. This **naive model
# parallelism** is what `device_map="auto"` of Hugging Face's libraries does.

# %% [markdown]
# ## 2. The idea: cut the batch as well
#
# With gradient accumulation a batch is made of $m$ **micro-batches** anyway. When rank 0 has done the first one's
# forward, it need not wait for it to come back: it takes the second. Below, time goes to the right, a box is one
# forward or backward, and its number is the micro-batch's; a backward takes as long as two forwards.

# %% tags=["nbval-ignore-output", "hide-input"]
import matplotlib.pyplot as plt

from refimpl.notebook import predict, show
from refimpl.parallel.pipeline.picture import fill
from refimpl.parallel.pipeline.schedules.named import schedule

figure, axes = show.figure(3.6, rows=2)
for axis, m in zip(axes, (1, 8), strict=True):
    fill(axis, schedule("gpipe", 4, m))
    axis.set_title(f"{m} micro-batch{'es' * (m > 1)}", fontsize=9)
plt.show()

# %% [markdown]
# Let a forward of a stage take $f$ and a backward $b$. The last of $p$ ranks begins after $p-1$ forwards, and when it
# has finished its last backward, $p-1$ more backwards run before rank 0 is done. So every rank idles $(p-1)(f+b)$, the
# **bubble**, beside $m(f+b)$ of work:
#
# $$\text{idle share} = \frac{(p-1)(f+b)}{m(f+b) + (p-1)(f+b)} = \frac{p-1}{m+p-1}.$$

# %% tags=["hide-input"]
predict(
    "16 stages. How many micro-batches does a step need so that no more than 5% of it is bubble?",
    285,
    unit="micro-batches",
    why="15 / (m + 15) = 0.05, so m = 19 x 15. With one sequence of 8192 tokens each these are 2.3 million tokens.",
)

# %% [markdown]
# The formula beside a **simulated clock**, which plays a table of operations, each as soon as it can (yours is the
# exercise `play`):

# %%
from refimpl.parallel.pipeline import clock

rows = {}
for p in (2, 4, 8):
    rows[f"{p} ranks"] = [
        f"{(p - 1) / (m + p - 1):.3f} = {clock.share(schedule('gpipe', p, m)):.3f}"
        for m in (1, 4, 8, 32)
    ]
pd.DataFrame.from_dict(rows, orient="index", columns=["m = 1", "m = 4", "m = 8", "m = 32"])

# %% [markdown]
# And on real ranks, whose layers sleep (times of this machine; a message takes some of it too):

# %% tags=["nbval-ignore-output"]
# %%ranks
for m in (1, 4, 8):
    _, idle = measured("gpipe", m)
    if rank == 0:
        print(f"m = {m}: idle {idle:.0%}, by formula {3 / (m + 3):.0%}")

# %% [markdown]
# ## 3. Build it: an order is a table
#
# Everything that schedules differ in is the *order* of forwards and backwards on each rank. So a schedule is data: for
# each rank a list of (kind, stage, micro-batch). All forwards and then all backwards is **GPipe** (Huang et al. 2018):


# %%
def gpipe(stage, micro_batches):
    every = range(micro_batches)
    return [("F", stage, k) for k in every] + [("B", stage, k) for k in every]


print(gpipe(stage=1, micro_batches=3))

# %% [markdown]
# A large $m$ makes the bubble small. But between its forward and its backward a micro-batch keeps its activations.

# %% tags=["hide-input"]
predict(
    "GPipe, 8 stages, 64 micro-batches. Of how many micro-batches does the first stage hold activations at once?",
    64,
    unit="micro-batches",
    why="All forwards come before the first backward. What shrinks the bubble fills the memory.",
)

# %% [markdown]
# Look at the picture again: rank 3 could begin the backward of micro-batch 0 right after its forward. Nothing in
# backward waits for the forwards that follow. **1F1B**, one forward and one backward by turns (PipeDream-Flush,
# Narayanan et al. 2021), starts each backward as early as it can. A stage with $s$ stages behind it runs $s$ forwards
# ahead (the *warm-up*), one for each stage that the first micro-batch has still to pass, and from then on (the *steady
# state*) holds no more than $s + 1$. Backwards that are left drain the pipeline (the *cool-down*, or flush), and then
# comes the optimizer's step. (The first PipeDream never drained: it kept several versions of the weights instead.)
#
# **Your turn.** `%hint 12_pipeline one_f_one_b` helps.


# %%
# %%task 12_pipeline one_f_one_b
def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    """1F1B, the order of one stage: some forwards ahead, then one forward and one backward by
    turns, then backwards.

    Ahead are as many forwards as there are stages behind this one. Micro-batches are in order,
    forward and backward. So at most stages - stage micro-batches are between their forward and
    their backward; the bubble is GPipe's. Any number of micro-batches, also fewer than stages.
    Example: one_f_one_b(1, 3, 3) -> F0 F1 B0 F2 B1 B2, each as ("F", 1, 0) and so on.
    """
    raise NotImplementedError("one_f_one_b")


# %% tags=["hide-input"]
predict(
    "4 stages, 8 micro-batches: GPipe idles 3/11 of the step. And 1F1B?",
    "as much",
    options=["as much", "half as much", "a quarter as much"],
    why="The first forward still takes p-1 ticks to the last rank and the last gradient p-1 back. Only memory shrinks.",
)

# %% tags=["nbval-ignore-output", "hide-input"]
figure, axes = show.figure(3.6, rows=2)
for axis, name in zip(axes, ("gpipe", "1f1b"), strict=True):
    table = schedule(name, 4, 8)
    fill(axis, table)
    axis.set_title(f"{name}: alive {clock.alive(table)}", fontsize=9)
plt.show()

# %% [markdown]
# Counted, not drawn (the pictures' titles call it *alive*): on real ranks, saved-tensor hooks say of how many
# micro-batches autograd keeps anything. (A stage's *output* is not kept: once it is sent, only its place in the graph
# is needed. Megatron calls letting go of it `deallocate_output_tensor`.) With activations computed again, as in chapter
# 07, each of these is one input a block instead of sixteen tensors (in GPipe's own paper one input a *stage*): the
# count stays, what is counted shrinks.

# %%
# %%ranks
import weakref

from torch.autograd.graph import saved_tensors_hooks


class Saved:
    def __init__(self, tensor):
        self.tensor = tensor.detach()


def most_kept(name, micro_batches):
    """The most micro-batches of which autograd keeps tensors on this rank, looked at after each forward."""
    graphs, counts, layer = [], [], nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def stage(x):
        graphs.append(weakref.WeakSet())

        def pack(tensor):
            saved = Saved(tensor)
            graphs[-1].add(saved)
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved.tensor):
            y = layer(x)
        counts.append(sum(map(bool, graphs)))
        return y

    table = schedule(name, group.size, micro_batches)
    pipeline = Pipeline(table, {rank: stage}, group, lambda y, _: y.square().mean())
    pipeline.run([torch.ones(8, WIDTH)] * micro_batches, [None] * micro_batches)
    return max(counts), table.alive[rank]


for name in ("gpipe", "1f1b"):
    for m in (2, 8):
        kept = group.all_gather_object(most_kept(name, m))
        if rank == 0:
            print(
                f"{name:6} m = {m}: counted {[n for n, _ in kept]}, stated {[n for _, n in kept]}"
            )

# %% [markdown]
# The table says what comes when. What one rank does at each tick is short as well: receive, compute, send. It is the
# exercise `Stage`, graded on real ranks with bytes, memory and transfers under way.

# %% [markdown]
# ## 4. Read it: one runner for every table
#
# refimpl's runner knows no schedule by name. It gets a table, adds the messages to it, and follows its own lines:

# %%
from refimpl.parallel.pipeline.runner import Step

show.source(Step.do)

# %% [markdown]
# So all seven schedules of this chapter run by the same code, and so does one that you invent, once `verify` has found
# it complete, in order and free of deadlock. A pipeline divides no sum: each layer computes what it would in one
# process, and adds its micro-batches in order. So the gradients are not close to those of accumulation in one process,
# they are the same bits:

# %%
# %%ranks
from refimpl.parallel.pipeline.schedules.named import NAMES
from refimpl.parallel.pipeline.shared import sum_gradients


def layer_of(stage):
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))


def loss(y, target):
    return (y - target).square().mean()


def batch(m):
    torch.manual_seed(99)
    return list(torch.randn(m, 8, WIDTH)), list(torch.randn(m, 8, WIDTH))


def one_process(table):
    """Every stage's gradients, accumulated. DualPipe has two copies of a stage, for even and odd micro-batches."""
    total, m = None, table.micro_batches
    for path in range(len(table.paths)):
        model = nn.Sequential(*map(layer_of, range(table.stages)))
        for k, (x, target) in enumerate(zip(*batch(m), strict=True)):
            if k % len(table.paths) == path:
                (loss(model(x), target) / m).backward()
        grads = [p.grad for p in model.parameters()]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
    return [total[4 * s : 4 * s + 4] for s in range(table.stages)]


def train(name, m, chunks=None):
    """Whether the bits are equal, and the bytes sent across borders."""
    table = schedule(name, group.size, m, chunks)
    stages = {s: layer_of(s) for s in table.holds(rank)}
    group.ledger.reset()
    Pipeline(table, stages, group, loss).run(*batch(m))
    sent = group.ledger.sent_bytes("tag")
    if len(table.paths) > 1:
        for s, holders in enumerate(zip(*table.paths, strict=True)):
            if rank in holders:
                sum_gradients(group, holders, list(stages[s].parameters()))
    truth = one_process(table)
    same = all(
        torch.equal(p.grad, grad)
        for s, layer in stages.items()
        for p, grad in zip(layer.parameters(), truth[s], strict=True)
    )
    return same, sum(sent.get(f"pipeline {what}", 0) for what in ("activations", "gradients"))


found = {name: group.all_gather_object(train(name, 6)) for name in NAMES}
found["interleaved, v = 3"] = group.all_gather_object(train("interleaved", 6, 3))
one = 6 * 8 * WIDTH * 4  # bytes that cross a border in one direction
if rank == 0:
    for name, ranks_ in found.items():
        borders = sum(sent for _, sent in ranks_) / one / 2
        print(f"{name:18} equal bits: {all(same for same, _ in ranks_)}, borders: {borders:g}")

# %% [markdown]
# A border is a place where one activation and one gradient cross from rank to rank for each micro-batch. Where the other
# counts come from is next.

# %% [markdown]
# ## 5. Measure it: what makes the bubble smaller
#
# **Shorter pieces.** The bubble is $p-1$ forwards and backwards of *a stage*. Give each rank $v$ stages, a $v$-th as
# long, that lie apart: rank 0 the first and the fifth of eight, and so on. That is **interleaved 1F1B** (Narayanan et
# al. 2021; Megatron says *virtual* stages). A micro-batch passes all ranks $v$ times, and the pipeline fills by pieces
# that are $v$ times shorter.
#
# $$\text{bubble} = \frac{1}{v}\,(p-1)(f+b).$$

# %% tags=["hide-input"]
predict(
    "4 ranks, interleaved with v = 3 instead of plain 1F1B. By what factor do the bytes between ranks grow?",
    11 / 3,
    why="12 stages in a chain have 11 borders, 4 stages have 3: (p v - 1) / (p - 1), a little more than v.",
)

# %%
rows = {}
for v in (1, 2, 3):
    table = schedule("interleaved", 4, 8, v) if v > 1 else schedule("1f1b", 4, 8)
    rows[f"v = {v}"] = [
        f"{3 * 3 / v:g} = {clock.bubble(table) / v:g}",
        4 * v - 1,
        f"{max(clock.alive(table)) / v:.2f}",
    ]
pd.DataFrame.from_dict(rows, orient="index", columns=["bubble, ticks", "borders", "alive"])

# %% [markdown]
# (A tick is the forward of a whole rank's layers, a backward takes two. Alive: micro-batches of a whole rank's layers.)
# Not for nothing: more messages, more memory, and by default Megatron asks for an $m$ that is a multiple of $p$. refimpl
# makes the table for the next multiple and leaves out what is too many (the formula does not hold then, and
# `clock.bubble` plays the table); torch wants a multiple of the number of rounds.
#
# **Work that nobody waits for.** Backward of $y = xW$ is two products, and only one of them is urgent:
#
# $$\underbrace{dx = dy\,W^\top}_{\text{input half: the stage before waits}} \qquad
# \underbrace{dW = x^\top dy}_{\text{weight half: the optimizer waits, much later}}$$
#
# Qi et al. (2024) split them: the input halves travel back through the pipeline without delay, and the weight halves go
# where a rank would idle. In **ZB-H1** (DeepSeek's tables say ZB1P) stage $s$ runs them $s$ micro-batches late, and
# with $m \ge p$ the bubble falls to $(p-1)(f+i-w)$, where $i$ and $w$ are the times of the two halves: a third, when
# all three are equal. How would you keep autograd from doing both at once? `%hint 12_pipeline split_linear` helps.


# %%
# %%task 12_pipeline split_linear
def split_linear(x: Tensor, weight: Tensor, bias: Tensor, later: list[Later]) -> Tensor:
    """x @ weight.T + bias, [..., i] -> [..., o], whose backward computes the gradient of x
    alone.

    Its weight half is put off: backward appends to `later` a function that adds the gradients
    to weight.grad [o, i] and bias.grad [o], which may be None before, and which have no graph,
    like those that autograd makes. Each function is called once, in any order and at any time,
    and lets go of all it has kept afterwards. Until then x and the gradient are kept, as they
    are, and no copies. Write a torch.autograd.Function that is applied to x, weight and bias,
    so that autograd calls it also where x needs no gradient; then no gradient of x is
    computed. If weight and bias are frozen, nothing is put off.
    """
    raise NotImplementedError("split_linear")


# %% [markdown]
# refimpl's runner does it for any layer, from outside ([halves.py](../refimpl/parallel/pipeline/halves.py)): it runs
# autograd's graph for the inputs alone, notes the gradient at each node with a weight, and begins again there.
#
# **No idle time at all?** Lay the stages down and up again, as a V: rank $r$ has stages $r$ and $2p-1-r$, so the last
# stage is on the first rank and a backward begins where the micro-batch began (**ZB-V**). Or send micro-batches from
# both ends through two copies of the model (**DualPipe**, made for DeepSeek-V3): in the middle of the step each rank
# pairs a forward of one direction with a backward of the other. Folded in the middle, onto the places of the V, DualPipe
# keeps its pairs and needs no second copy (**DualPipeV**). It idles $p-1$ forwards of a half-sized stage, and
# $4(p-1)-1$ where no backward is split, as in DeepSpeed: more than interleaved 1F1B's $3(p-1)$.
#
# ZB-V's zero has two conditions. Forward and both halves must take equally long. And ranks begin a step one after the
# other, and must enter the next one so: a global gradient norm, for which all wait, brings the bubble back. Qi et al.
# step first, check the norm afterwards, and undo the rare step that it forbids.

# %% tags=["nbval-ignore-output", "hide-input"]
figure, axes = show.figure(5.6, rows=3)
for axis, name in zip(axes, ("zb-h1", "zb-v", "dualpipe"), strict=True):
    table = schedule(name, 4, 8)
    fill(axis, table)
    axis.set_title(f"{name}: idle {clock.share(table):.0%}", fontsize=9)
plt.show()

# %% [markdown]
# All of them, under sizes of your choice (idle: the share of a step on the rank that idles most, with $f = i = w$; alive:
# micro-batches of a whole rank's layers; paler boxes are a rank's later stages):

# %% tags=["hide-input"]
from refimpl.notebook.widgets_pipeline import schedule_knobs

schedule_knobs()

# %% [markdown]
# **An unequal cut costs like a bubble.** The slowest stage sets the pace of all. With a large vocabulary a small
# model's head computes as long as ten blocks, and its embedding, a look-up, takes no time but as much memory. So the
# same number of layers for each stage is seldom right. Where to cut a chain so that the largest stage is as small as
# can be is solved exactly by dynamic programming (`balanced` in the exercises):

# %% tags=["hide-input"]
predict(
    "An embedding of weight 6, then 12 blocks of weight 1, then a head of weight 6, over 4 stages. "
    "What is the weight of the largest stage in the best cut?",
    6,
    why="6 | 6 blocks | 6 blocks | 6. With 14 layers dealt out as 4, 4, 3, 3 it is 9.",
)

# %%
from itertools import pairwise

from refimpl.parallel.pipeline.partition import balanced, uniform

weights = [6] + [1] * 12 + [6]
rows = {}
for name, bounds in {"uniform": uniform(14, 4), "balanced": balanced(weights, 4)}.items():
    sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
    rows[name] = [bounds, sums, f"{max(sums) / (sum(weights) / 4):.2f}"]
pd.DataFrame.from_dict(rows, orient="index", columns=["bounds", "stages", "step, x even"])

# %% [markdown]
# **Tied weights.** The GPT's head is its embedding: first stage and last stage hold the same matrix. Each has a copy, and
# each copy's gradient is only a part. After the last micro-batch the parts are summed, on both, and equal optimizers keep
# the copies equal. Left out, nothing fails:

# %% tags=["hide-input"]
predict(
    "The sum is left out. Both copies begin equal. What happens in training?",
    "they drift apart, silently",
    options=["they stay equal", "they drift apart, silently", "the loss becomes NaN"],
    why="Each stage updates its own copy with its own part. The saved model has one of them, and is worse than it was.",
)

# %%
# %%ranks
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.pipeline.gpt import gpt_layers, gpt_loss
from refimpl.parallel.pipeline.module import PipelineModule

config = GPTConfig(context=16, width=32, layers=4, heads=2)
data = Batches(corpus(), context=16, size=2)


def tied(summed):
    """Whether the two copies are equal after three steps."""
    torch.manual_seed(0)
    model = PipelineModule(gpt_layers(GPT(config)), group, gpt_loss)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shared = model.shared
    model.shared = shared if summed else []
    for step in range(3):
        pairs = [data.batch(step, k) for k in range(4)]
        model.forward_backward([x for x, _ in pairs], [y for _, y in pairs])
        adamw.step()
        adamw.zero_grad()
    copies = group.all_gather_object([p.detach() for _, params in shared for p in params])
    held = [copy[0] for copy in copies if copy]
    return len(held), torch.equal(held[0], held[-1])


for summed in (True, False):
    copies, equal = tied(summed)
    if rank == 0:
        print(f"summed: {summed!s:5}  copies: {copies}, equal after 3 steps: {equal}")

# %% [markdown]
# **With ZeRO.** Several pipelines side by side are data parallelism: the replicas of a stage share their gradients, once
# a step, and ZeRO-1 shards their optimizer. Two replicas of two stages on our four ranks, six micro-batches:

# %%
# %%ranks
from refimpl.comm.mesh import Mesh
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.ddp import DDP
from refimpl.zero.zero1 import Zero1

mesh = Mesh({"pipe": 2, "data": 2})
for kind in (DDP, Zero1):
    torch.manual_seed(0)
    model = PipelineModule(gpt_layers(GPT(config)), mesh.group("pipe"), gpt_loss)
    replicas = mesh.group("data")
    stage = kind(model, torch.optim.AdamW(model.parameters(), lr=1e-2), replicas)
    stage.spans(model.group, model.repeated)  # the norm is of all stages
    for step in range(2):
        replicas.ledger.reset()
        pairs = [data.batch(step, 6 * mesh.coordinates["data"] + k) for k in range(6)]
        with stage.no_sync():  # the replicas meet once, in `step`
            model.forward_backward([x for x, _ in pairs], [y for _, y in pairs])
        stage.step()
    sent, n = replicas.ledger.sent_bytes("tag"), sum(p.numel() for p in model.parameters())
    kept = MemoryMeter(stage.tensors).now()["optimizer"]
    print(
        f"{kind.__name__:6} optimizer {kept / n:.1f} bytes a parameter, sent {sent.get('gradients', 0) / n:.1f} for "
        f"gradients, {sent.get('parameters', 0) / n:.1f} for weights"
    )

# %% [markdown]
# Why not ZeRO-2 or 3? They reduce (and gather) for every micro-batch, and a pipeline lives on many of them. In units of
# the stage's parameters, $m$ micro-batches send $m + 1$ and $3m$ instead of 2:

# %%
from refimpl.plan.formulas import Layout, traffic

layout = Layout(10**9, padding=0, buckets=0)
rows = {}
for m in (1, 8, 64):
    rows[f"m = {m}"] = [
        round(
            sum(row.bytes for row in traffic(name, 2, 1, layout, m) if row.tag != "norm")
            * 2
            / 1e9
        )
        for name in ("zero1", "zero2", "zero3")
    ]
pd.DataFrame.from_dict(rows, orient="index", columns=["ZeRO-1", "ZeRO-2", "ZeRO-3"])

# %% [markdown]
# And the stages have divided weights and gradients by $p$ already. DeepSpeed's pipeline engine, and
# [refimpl's](../refimpl/engine/pipeline.py), take stages 0 and 1 only.

# %% [markdown]
# ## 6. Break it: two ranks that both send first
#
# A rank that looks at itself alone would write: get what the next operation needs, compute, send what it gives. That is
# right for GPipe. In 1F1B's steady state the neighbours exchange: stage 0 sends an activation down, stage 1 a gradient
# up. And a send may end only when its receiver has come, a **rendezvous**. gloo's always do; NCCL's and MPI's only for
# messages larger than their buffers, which neither promises, and so such a program may run for years.

# %% tags=["raises-exception"]
# %%ranks 2 --timeout 3
activation, gradient = torch.ones(4), torch.ones(4)
if rank == 0:
    group.send(activation, 1)  # micro-batch 1 goes down
    group.recv(gradient, 1)  # micro-batch 0 comes back
else:
    group.send(gradient, 0)
    group.recv(activation, 0)

# %% [markdown]
# The report names both ranks, the call they stand in and its line. To find it before there are any ranks, play the
# programs on paper: a message happens only when both its ranks have come to it.

# %%
from refimpl.parallel.pipeline.clock import ScheduleError
from refimpl.parallel.pipeline.messages import Recv, Send, programs
from refimpl.parallel.pipeline.verify import run_synchronously


def each_for_itself(table):
    """Every rank's program: get what is needed, compute, send what is made."""
    result = []
    for rank, order in enumerate(table.orders):
        lines = []
        for op in order:
            needs = [(v, table.rank_of(v.stage, v.micro)) for v in op.needs(table.stages)]
            lines += [Recv(v, source) for v, source in needs if source != rank]
            lines.append(op)
            to = table.receiver(op.gives) if op.gives else None
            lines += [Send(op.gives, to)] if to is not None else []
        result.append(lines)
    return result


for name in ("gpipe", "1f1b"):
    table = schedule(name, 2, 4)
    for how, lines in (
        ("each for itself", each_for_itself(table)),
        ("one list", programs(table)),
    ):
        try:
            run_synchronously(table, lines)
            print(f"{name}, {how}: ends")
        except ScheduleError as error:
            print(f"{name}, {how}: stops")
            print(" ", str(error).partition("goes on. ")[2].replace("; ", "\n  "))

# %% tags=["hide-input"]
predict(
    "Which of these would NOT mend it?",
    "a longer timeout",
    options=[
        "begin the sends, and wait for them later",
        "stage 1 receives first, then sends",
        "post the send and the receive as one call",
        "a longer timeout",
    ],
    why="Each waits for a call that the other makes only afterwards: for ever. The other three are what people do.",
)

# %% [markdown]
# refimpl writes the messages of *all* ranks in one list, ordered by the clock, and each rank follows its own lines: of
# all lines not done, the first can always be done. Its sends are begun and waited for later besides.
#
# ## 7. How others do it
#
# | | refimpl | DeepSpeed | Megatron-Core | torch.distributed.pipelining |
# |---|---|---|---|---|
# | schedules | GPipe, 1F1B, interleaved, ZB-H1, ZB-V, DualPipe, DualPipeV | 1F1B (`TrainSchedule`); DualPipeV since 0.19.8, backward whole | 1F1B, interleaved | GPipe, 1F1B, interleaved (and breadth first), zero bubble, ZB-V, DualPipeV |
# | what it is | a table, checked before it runs | instructions a tick, by parity of stage and tick | loops in code | a table of actions (1F1B: loops) |
# | messages | one list for all ranks | in pairs: one side sends, the other receives first | `batch_isend_irecv`, or even ranks send first | batched pairs, or added to the table |
# | activations kept | as the table states | max(2, min(p - s, m)) buffers | as 1F1B | as the schedule |
# | shapes | agreed once, or `dynamic` | once, or each time (`dynamic_shape`) | from the configuration, or each time (`variable_seq_lengths`) | from the first micro-batch, an example or a trace |
# | m, interleaved | any | | by default a multiple of p | a multiple of the number of rounds |
# | tied weights | summed, found by identity or key | `TiedLayerSpec`, `ReduceTiedGrads` | an all-reduce of the embedding's group | by hand |
#
# The options: `--pipeline-model-parallel-size` and `--num-layers-per-virtual-pipeline-stage` in Megatron-LM;
# `PipelineModule(layers, num_stages=p)` in DeepSpeed, whose $m$ is `gradient_accumulation_steps`.
#
# **Who runs it.** DeepSeek-V3: 16-way pipelines by DualPipe, 64-way expert parallelism (chapter 15) over 8 nodes,
# ZeRO-1, no tensor parallelism (section 3.2 of its report). Its authors state the bubble as $(p/2-1)(F{\&}B + B - 3W)$,
# with two copies of the parameters and activations of $p+1$ micro-batches: `F&B` is a forward and a backward that
# overlap. Played as one operation whose results come at its end, the table gives just that:

# %%
from refimpl.parallel.pipeline.schedules.table import Cost

cost, p = Cost(1, 1, 1), 8
table = schedule("dualpipe", p, 2 * p)
f_and_b, b, w = 3, 2, 1  # a pair run as one operation of three ticks
print(
    "pairs as one operation:",
    clock.bubble(table, cost, pairs=True),
    "=",
    (p / 2 - 1) * (f_and_b + b - 3 * w),
)
print("alive at most:", max(clock.alive(table)), "=", p + 1)

# %% [markdown]
# Llama 3's 405 billion parameters: 16 stages between nodes with 8-way tensor parallelism inside, interleaved, and *one
# layer less on the first and on the last stage*, because the embedding and the head are there: a balanced cut by hand.
# Its 126 layers are 128 less two. They also let a rank run any number of micro-batches in a row, so that $m$ need not be
# a multiple of $p$ (section 3.3.2 of its paper).
#
# DualPipe's pairs do not need its two copies. Megatron-Core makes them in interleaved 1F1B
# (`--overlap-moe-expert-parallel-comm`): with one forward more ahead, the forward and the backward of a turn do not need
# each other, and the experts' all-to-alls of one hide behind the products of the other. That does not shorten the bubble.

# %% [markdown]
# ## 8. Prove it
#
# - **Exercises:** [exercises/12_pipeline](../exercises/12_pipeline/exercise.py): `pytest exercises/12_pipeline`
# - **Quiz:** `refimpl quiz --topic parallelism`, or `Quiz("parallelism")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [test_pipeline_schedules.py](../tests/parallel/test_pipeline_schedules.py) (every
#   schedule at every size up to 8 ranks and 16 micro-batches: complete, in order, no deadlock, memory and bubble as
#   stated), [test_pipeline_runner.py](../tests/parallel/test_pipeline_runner.py) (bits, bytes, a rank that dies),
#   [test_pipeline_with_data.py](../tests/parallel/test_pipeline_with_data.py) (replicas with ZeRO-1).
# - **Code:** [schedules](../refimpl/parallel/pipeline/schedules/table.py),
#   [clock.py](../refimpl/parallel/pipeline/clock.py), [verify.py](../refimpl/parallel/pipeline/verify.py),
#   [runner.py](../refimpl/parallel/pipeline/runner.py), [module.py](../refimpl/parallel/pipeline/module.py).
# - **DeepSpeed:**
#   [schedule.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/pipe/schedule.py),
#   [engine.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/pipe/engine.py).
# - **Papers:** Huang et al. 2018, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965) (GPipe). Narayanan et al. 2021,
#   [arXiv:2104.04473](https://arxiv.org/abs/2104.04473), section 2.2 (1F1B, interleaved). Qi et al. 2024,
#   [arXiv:2401.10241](https://arxiv.org/abs/2401.10241) (zero bubble) and
#   [arXiv:2405.15362](https://arxiv.org/abs/2405.15362) (the V). DeepSeek-AI 2024,
#   [arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 3.2 (DualPipe). Llama team 2024,
#   [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.2.
