# %% [markdown]
# # 10 · Communication: fewer bytes, nearer neighbours
#
# So far every byte that the algorithm asks for was sent, in full width, to whoever needed it. That is right where links
# are fast. Between machines they are not. This chapter puts a slow link between two halves of your machine, counts what
# crosses it, and makes that less in four ways: fewer bits a number, sums that are formed nearby, meetings that are
# rarer, and transfers that hide. Each has a price; you will measure it, and say when it pays. You need chapters 01, 02
# and 06.

# %% [markdown]
# ## 1. The pain: two machines are not one large machine
#
# Gradients of 7 billion parameters in bf16, all-reduced by a ring of 16 ranks, on the links that people have. The
# second column is what an H100 needs to *compute* the step for 8192 tokens a GPU, at 40% of its 990 TFLOP/s (the
# vendor's figure):

# %%
# %load_ext refimpl.notebook

# %%
import pandas as pd

from refimpl.plan.time import Link, ring_all_reduce_seconds

P, tokens = 7e9, 8192
compute = 6 * P * tokens / (0.4 * 990e12)
LINKS = {
    "NVLink, 450 GB/s": Link(3e-6, 450e9),
    "400 Gbit/s a GPU": Link(10e-6, 50e9),
    "25 Gbit/s Ethernet": Link(30e-6, 25e9 / 8),
    "1 Gbit/s, two offices": Link(1e-3, 1e9 / 8),
}
rows = {}
for name, link in LINKS.items():
    send = ring_all_reduce_seconds(2 * P, 16, link)
    rows[name] = [f"{send:,.2f}", f"{compute:.2f}", f"{compute / (compute + send):.1%}"]
columns = ["all-reduce, s", "compute, s", "busy, if nothing overlaps"]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# Now on your own machine. A `Link` is a cable between the "nodes" of a job: a message of $n$ bytes occupies it for
# $n$ / bandwidth and arrives `latency` later; all ranks of a node share it, and whoever waits sleeps. Four ranks, two a
# node, 100 Mbit/s. The bytes that cross are counted.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "4 ranks, 2 nodes. In an all-reduce of n bytes each rank sends n/4 to each other rank, twice (once to be added, once "
    "as the sum). How many bytes cross from one node to the other, in units of n?",
    2,
    unit="n",
    why="Each of 2 ranks has 2 ranks on the other side: 2 x 2 x n/4, twice.",
)

# %%
# %%ranks 4
import os
import time

import torch

from refimpl.comm.link import Link
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP

os.environ["REFIMPL_RANKS_PER_NODE"] = "2"
torch.set_num_threads(1)
CABLE = Link(bits_per_second=1e8, latency=1e-3)
config = GPTConfig(vocab=256, context=32, width=64, layers=2, heads=2)
batches = Batches(corpus(), context=32, size=2)


def model():
    torch.manual_seed(0)
    return GPT(config)


def steps(group, count=6, **options):
    """Losses, seconds of the quickest step, and this rank's part of what crossed in the last."""
    whole = model()
    adamw = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    stage = DDP(whole, adamw, group, ZeroConfig(**options))
    losses, seconds = [], []
    for step in range(count):
        start = time.perf_counter()
        group.ledger.reset()
        losses.append(stage.model(*batches.batch(step, rank)))
        stage.backward(losses[-1])
        stage.step()
        seconds.append(time.perf_counter() - start)
    crossed = sum(group.ledger.crossed_bytes().values())
    return [loss.item() for loss in losses], min(seconds), crossed


slow = group.throttled(CABLE)
near, far = steps(group), steps(slow)
parameters = sum(p.numel() for p in model().parameters())
node = sum(group.all_gather_object(far[2])[:2])
times = {"no cable": near[1], "100 Mbit/s": far[1]}
print("the same losses:", near[0] == far[0])
print(f"{parameters:,} parameters, {node:,} bytes leave a node: {node / parameters / 4:.2f} n")

# %% tags=["nbval-ignore-output", "hide-input"]
times = ranks.pull("times")[0]
pd.DataFrame({"ms a step": {name: f"{1e3 * s:.0f}" for name, s in times.items()}})

# %% [markdown]
# The losses are the same to the bit: only time is lost. (Of six steps the quickest counts.)
#
# ## 2. The idea: four ways to send less, or to wait less
#
# A transfer of $n$ bytes in $m$ messages takes $m\,\alpha + n\,\beta$: $\alpha$ seconds a message, $\beta$ a byte. Backward
# hides some of it. So the step takes
#
# $$\text{compute} + \max\big(0,\; m\,\alpha + n\,\beta - \text{hidden}\big),$$
#
# ```mermaid
# flowchart LR
#   subgraph A["node"]
#     r0((0)) === r1((1))
#   end
#   subgraph B["node"]
#     r2((2)) === r3((3))
#   end
#   A -- "one cable: slow" --> B
#   B --> A
# ```
#
# and there is a lever on each part of it:
#
# | | what becomes less | at the price of | who does it |
# |---|---|---|---|
# | **fewer bits** | $n$: 4 to 100 times | noise, an error to keep, work | 1-bit Adam, PowerSGD, ZeRO++ |
# | **nearer** | $n$ and $m$ on the slow level | a second copy, another order of the sum | two-level collectives, hpZ, MiCS, HSDP |
# | **less often** | $n$ and $m$: H times | ranks drift apart | local SGD, DiLoCo |
# | **at another time** | nothing; more is hidden | buffers, a bucket size to choose | DDP's buckets, ZeRO-3's prefetch |
#
# (HSDP and MiCS were in chapter 6. The other names are explained below, where their turn comes.)

# %% [markdown]
# ## 3. Build it
#
# **Fewer numbers.** Of a gradient send the 1% that are largest. The receiver does not know which they are, so each value
# travels with its index, 4 bytes. And the sum of several ranks' top-k is no top-k: everybody's values and indices go to
# everybody.

# %% tags=["hide-input"]
predict(
    "fp32, 4 ranks, top-1% by an all-gather of values and int32 indices. How many times fewer bytes than a ring "
    "all-reduce of everything?",
    25,
    unit="times",
    why="2 x 4 n (N-1)/N bytes against (N-1) x 8 x n/100: 100/N. At 100 ranks nothing is saved at all.",
)

# %% [markdown]
# What is not sent is not thrown away. It waits in an **error** and is added to the next gradient:
#
# $$y_t = g_t + e_t, \qquad \text{sent}_t = C(y_t), \qquad e_{t+1} = y_t - C(y_t),$$
#
# so after any number of steps the sum of what was sent is the sum of the gradients, less *one* error. **Your turn**; and
# mind what bf16 does to a value on its way.


# %%
# %%task 10_communication top_k
def top_k(grad: Tensor, error: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k elements of grad + error that are largest in magnitude; the rest stays in the
    error.

    grad [n], fp32 or bf16; error [n] fp32, changed in place; k is at least 1, and may be above
    n -> (values [k] in grad's dtype, indices [k] int32, ascending), of min(k, n) elements. Of
    equally large ones the first are taken. Nothing is lost: what is sent and the new error add
    up to grad + error in fp32, also where a value was rounded to grad's dtype. grad keeps its
    values.
    Example: grad [3, -1, 2], error [0, -4, 0], k = 1 -> values [-5], indices [1]; the error is
    [3, 0, 2].
    """
    raise NotImplementedError("top_k")


# %% [markdown]
# How much does the error matter? One gradient, sent again and again, and the mean of all that arrived beside the truth:

# %%
import torch

from refimpl.compress.blocks import Blocks
from refimpl.compress.feedback import ErrorFeedback
from refimpl.compress.sign import Sign
from refimpl.compress.topk import TopK

torch.set_num_threads(1)
g = torch.randn(10_000, generator=torch.Generator().manual_seed(0))


def off(compress, operator, calls):
    """How far the mean of `calls` messages is from what was meant."""
    total = sum(operator.decompress(compress(g), len(g)) for _ in range(calls))
    return f"{((total / calls - g).norm() / g.norm()).item():.3f}"


rows = {}
for name, operator in {"top 1%": TopK(0.01), "int4": Blocks(4), "1 bit": Sign()}.items():
    bare, kept = operator.compress, ErrorFeedback(operator, len(g)).compress
    rows[name] = [off(bare, operator, 1), off(bare, operator, 100), off(kept, operator, 100)]
columns = ["1 message", "100 messages", "100, with an error"]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# Without an error the hundredth message says what the first one said: what an operator drops, it drops for good. All
# that is asked of $C$ is to be a **contraction**, $|C(x) - x|^2 \le b\,|x|^2$ with $b < 1$; then SGD with feedback converges as
# fast as without compression, after a while (Karimireddy et al. 2019). An *unbiased* operator, such as rounding up or down
# at random, does without.
#
# **Fewer bits.** To **quantise** to int8 is to take a block of 256 numbers, let its **scale** be the largest magnitude
# / 127, and send of each number its **code**: number / scale, rounded to a whole number from -127 to 127. Code times
# scale is nearly the number again. int4 has codes from -7 to 7, and one bit has a sign and nothing else. What travels
# of a gradient, codes and scales, is its **wire**, of $W$ bytes. Here the question is who adds.

# %% tags=["hide-input"]
predict(
    "Rank 0 sends the int8 codes 100 with scale 0.01, rank 1 the codes 50 with scale 1. Can an all-reduce add the codes?",
    "no: 150 means nothing, and int8 ends at 127",
    options=[
        "yes, and the scales too",
        "yes, with the mean scale",
        "no: 150 means nothing, and int8 ends at 127",
    ],
    why="1 + 50 = 51 is right. The codes have different units: dequantise, then add. So whoever adds must have all wires.",
)

# %% [markdown]
# Two ways to arrange that. **Gathered**: every wire to every rank, $(N-1)\,W$ bytes. **Served**: rank $i$ is the server of
# chunk $i$; it gets everybody's chunk, dequantises, adds, and compresses the mean once more for all, with a second error
# of its own: $2\,(N-1)\,W/N$. That is 1-bit Adam's way. (`one_bit_mean` in the exercises.) Counted on a real gradient,
# and how far the mean is from the truth at the first call and over 20:

# %%
# %%ranks 4
from refimpl.compress.blocks import Blocks
from refimpl.compress.exchange import Gathered, Served
from refimpl.compress.powersgd import LowRank, PowerSGD
from refimpl.compress.sign import Sign
from refimpl.compress.topk import TopK

gpt = model()
gpt(*batches.batch(0, rank)).backward()
x = torch.cat([p.grad.view(-1) for p in gpt.parameters()])
shapes, n = [p.shape for p in gpt.parameters()], len(x)
group.ledger.reset()
mean = x.clone()
group.all_reduce(mean, "mean")
dense = sum(group.ledger.sent_bytes().values())
ways = {
    "top 1%, gathered": Gathered(group, TopK(0.01), n),
    "int8, served": Served(group, Blocks(8), n),
    "int4, served": Served(group, Blocks(4), n),
    "1 bit, served": Served(group, Sign(), n),
    "PowerSGD, rank 4": LowRank(group, PowerSGD(4), n, shapes),
}
found = {"fp32": [dense, dense, "1.0", "0.00", "0.00"]}
for name, way in ways.items():
    total, errors = torch.zeros(n), []
    for call in range(20):
        group.ledger.reset()
        out = torch.empty(n)
        way.mean(x, out).wait()
        way.accept()
        total += out
        errors.append(((total / (call + 1) - mean).norm() / mean.norm()).item())
    sent = sum(group.ledger.sent_bytes().values())
    smaller = f"{dense / sent:.1f}"
    found[name] = [way.sent_bytes(), sent, smaller, f"{errors[0]:.2f}", f"{errors[-1]:.2f}"]

# %%
columns = ["formula", "counted", "times fewer", "off, 1 call", "off, 20 calls"]
pd.DataFrame.from_dict(ranks.pull("found")[0], orient="index", columns=columns)

# %% [markdown]
# Rounding by blocks is nearly exact after a few calls. One bit is coarse here: one scale for a whole GPT, whose
# tensors' gradients differ more than a hundredfold, so most of it waits in the error, and comes out slowly. In practice
# a scale is for a tensor or a bucket, and what travels is a momentum, which changes slowly.
#
# PowerSGD (Vogels et al. 2019) takes another road: a matrix $M\;[a, b]$ becomes $P\,Q^{\mathsf T}$ with $r$ columns each. A product
# $M q$ is *linear* in $M$, so here an all-reduce may add: $r\,(a + b)$ numbers in place of $a\,b$, whatever $N$ is. (`power_sgd`
# in the exercises.)
#
# **Nearer.** Each node has one cable. So let the node add up first, and send each number across once.


# %%
# %%task 10_communication two_level_all_reduce
def two_level_all_reduce(x: Tensor, near: Group, far: Group) -> None:
    """x [n] becomes the sum over all ranks, in place, and only 1 / P of it crosses between
    nodes.

    near: the P ranks of this node. far: the ranks with this place in every node. n is any
    number, of any dtype. One reduce-scatter in the node, one all-reduce across of ceil(n / P)
    elements, one all-gather in the node.
    """
    raise NotImplementedError("two_level_all_reduce")


# %% tags=["hide-input"]
predict(
    "2 nodes of 2 ranks, n bytes. First a reduce-scatter inside, then an all-reduce across of n/2 by each rank, then an "
    "all-gather inside. How many bytes leave a node, in units of n? (It was 2.)",
    1,
    unit="n",
    why="Two ranks each all-reduce n/2 over 2 nodes, and send 2 (n/2)(1/2) for it. In general 2 n (F-1)/F for F nodes.",
)

# %%
# %%ranks 4
from refimpl.comm import hierarchy, ring
from refimpl.comm.mesh import Mesh

mesh = Mesh({"far": 2, "near": 2}, link=CABLE)
inside, across = mesh.group("near"), mesh.group("far")
ways = {
    "each to each": lambda x: mesh.world.all_reduce(x),
    "ring": lambda x: ring.all_reduce(mesh.world, x),
    "two levels": lambda x: hierarchy.all_reduce(inside, across, x),
}
n, seconds = 1 << 16, {}
for name, way in ways.items():
    tries = []
    for _ in range(6):  # the quickest counts
        x = torch.arange(n).float() * (rank + 1)
        mesh.ledger.reset()
        mesh.world.barrier()
        start = time.perf_counter()
        way(x)
        mesh.world.barrier()
        tries.append(time.perf_counter() - start)
    seconds[name] = min(tries)
    left = sum(group.all_gather_object(sum(mesh.ledger.crossed_bytes().values()))[:2])
    print(f"{name:13} {left:9,} bytes leave node 0: {left / (4 * n):.2f} n", end=", ")
    print("right:", torch.allclose(x, torch.arange(n) * 10.0))

# %% tags=["nbval-ignore-output", "hide-input"]
measured = ranks.pull("seconds")[0]
table = {
    name: [f"{1e3 * s:.0f}", f"{measured['ring'] / s:.2f}"] for name, s in measured.items()
}
pd.DataFrame.from_dict(table, orient="index", columns=["ms", "times as fast as the ring"])

# %% [markdown]
# With $F$ nodes of $P$ ranks, $N = FP$, two levels are by the formula $F (N-1) / (N (F-1)) = 1.5$ times as fast as a
# flat ring here, and 2 times for two large nodes. (The formula counts bytes on the cable alone. Latency comes on top of
# both, and what a node does inside; and on a busy machine a ring of many messages is later still.) With one
# card a GPU, NCCL runs one ring through each card and reaches the same bytes; what stays is latency: $2(N-1)$ messages
# against $2(P-1) + 2(F-1)$, of which only the last $2(F-1)$ are far. Within a level one may still choose: a ring,
# recursive **halving** ($2 \log_2 N$ messages, `halving_all_reduce` in the exercises), a pair of trees. What is best
# follows from the measured $\alpha$ and $\beta$ of each level: `refimpl doctor --topology` measures them, says which
# ranks are near, and `REFIMPL_COLLECTIVES=measured` takes the best for each size.
#
# **Less often.** Each rank trains by itself for $H$ steps; then its way, start minus end, is averaged and treated as
# a *gradient* by a second optimizer. That is **DiLoCo** (inner AdamW, outer Nesterov, H = 500 in the paper).


# %%
# %%task 10_communication outer_step
def outer_step(
    params: Sequence[Tensor],
    start: Sequence[Tensor],
    momentum: Sequence[Tensor],
    lr: float,
    mu: float,
    group: Group,
) -> None:
    """DiLoCo: after H steps of each rank by itself, one step of all, by Nesterov's momentum.

    params: this rank's weights after its inner steps, fp32 or bf16. start: the weights from
    which all ranks began, and momentum: fp32, both equal on all ranks. All three are changed in
    place, and afterwards equal on all ranks. The outer gradient d is start minus the mean of
    the ranks' params, in fp32. momentum becomes mu momentum + d, start becomes start - lr
    (d + mu momentum), and params go on from there. One all-reduce of fp32 a tensor.
    Example: one rank, params [2], start [1], momentum [0], lr 0.5, mu 0.5: d = -1, momentum -1,
    start and params 1.75.
    """
    raise NotImplementedError("outer_step")


# %%
# %%ranks 4
from refimpl.optim.diloco import DiLoCo

H, STEPS = 10, 40


def alone(every):
    """Train by oneself, and meet every so many steps. Mean loss of the last steps; bytes sent to meet."""
    gpt = model()
    adamw = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
    diloco = DiLoCo(gpt, every, group)
    group.ledger.reset()
    losses = []
    for step in range(STEPS):
        loss = gpt(*batches.batch(step, rank))
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        diloco.step()
        losses.append(loss.item())
    end = sum(group.all_gather_object(sum(losses[-5:]) / 5)) / group.size
    return end, sum(group.ledger.sent_bytes().values())


def together():
    """The same by DDP."""
    gpt = model()
    stage = DDP(gpt, torch.optim.AdamW(gpt.parameters(), lr=2e-3), group)
    group.ledger.reset()
    losses = []
    for step in range(STEPS):
        loss = stage.model(*batches.batch(step, rank))
        stage.backward(loss)
        stage.step()
        losses.append(loss.item())
    end = sum(group.all_gather_object(sum(losses[-5:]) / 5)) / group.size
    return end, group.ledger.sent_bytes("tag")["gradients"]


(ddp, dense), (diloco, rare) = together(), alone(H)
print(f"DDP {dense:,} bytes, DiLoCo {rare:,}: {dense / rare:.0f} times fewer")
print("losses within 0.2 of each other:", abs(ddp - diloco) < 0.2)

# %% [markdown]
# **At another time.** Chapter 02 (`02_ddp`) sent buckets while backward still ran. How large should a bucket be? Small ones start
# early and pay $\alpha$ each; with one large bucket nothing overlaps at all.


# %%
# %%task 10_communication best_buckets
def best_buckets(
    nbytes: float,
    backward: float,
    alpha: float,
    beta: float,
    most: int,
) -> tuple[int, float]:
    """In how many equal buckets should gradients travel? -> (number, seconds that backward does
    not hide).

    Gradients of `nbytes` bytes come evenly over the `backward` seconds: bucket i of b is full
    at i / b of them. Buckets travel one after the other, each in alpha seconds + beta a byte.
    Exposed is the time from the end of backward until the last has arrived. The number is
    between 1 and `most`; of equally good ones the smallest.
    Example: 100 bytes, 1 s, alpha 0.1, beta 0.005: 1 bucket exposes 0.6 s, 2 expose 0.35 s, 5
    expose 0.2 s, the least.
    """
    raise NotImplementedError("best_buckets")


# %% tags=["hide-input"]
predict(
    "A slow link: the transfer takes longer than backward, T seconds. n bytes in k equal buckets, alpha a bucket. Which k is "
    "best?",
    "sqrt(T / alpha)",
    options=["1", "sqrt(T / alpha)", "T / alpha", "as many as there are layers"],
    why="The link is busy from T/k on, for k alpha + n beta. T/k + k alpha is least at k = sqrt(T / alpha).",
)

# %% tags=["nbval-ignore-output", "hide-input"]
import matplotlib.pyplot as plt

from refimpl.notebook import show
from refimpl.plan.time import exposed_seconds

backward, nbytes, alpha = 0.2, 1e9, 1e-3
figure, axis = show.figure(3)
for label, rate in (("10 GB/s", 10e9), ("5 GB/s", 5e9), ("2.5 GB/s", 2.5e9)):
    counts = sorted({round(1.25**i) for i in range(26)})
    seen = [1e3 * exposed_seconds(backward, k * alpha + nbytes / rate, k) for k in counts]
    axis.plot([nbytes / k / 1e6 for k in counts], seen, "-o", ms=3, label=label)
axis.set(
    xscale="log",
    xlabel="bucket, MB",
    ylabel="exposed, ms",
    title="1 GB of gradients, backward 200 ms, 1 ms a message",
)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# (A bucket is large on the right.) The left branch is latency. The right one is a bucket that nobody hides: on a fast
# link the last, which leaves when backward is over; on a slow one the first, for which the link waits. The valley is
# wide: that is why nobody tunes buckets to the byte, and why the default (25 MB in torch's DDP) is seldom far off on
# some tens of ranks. (In chapter 2 512 ranks wanted 175 MB.) `refimpl bench overlap` draws the same curve measured on a
# link of your choice, and the timeline of a step.
#
# ## 4. Read it
#
# Served, in refimpl, for any operator. `steps` yields a transfer and goes on when it has arrived, so that the next
# bucket may already be on its way:

# %%
from refimpl.compress import exchange

show.source(exchange.Scattered.scatter, exchange.Served.steps)

# %% [markdown]
# And ZeRO++'s gradients (qgZ), the same idea on two levels: int4 to the rank in the node that has the right *place*, added in
# fp32, int4 again to the node that needs it. Each gradient is rounded twice; on a ring it would be rounded $N - 1$ times.

# %%
from refimpl.zero.reduction import quantised_sum

show.source(quantised_sum.QuantisedSum._steps, quantised_sum.QuantisedSum._hop)

# %% [markdown]
# How others do it:
#
# | | refimpl | PyTorch | DeepSpeed | NCCL |
# |---|---|---|---|---|
# | compressed gradients | `ZeroConfig(compression=...)`, DDP and ZeRO-1 | hooks of DDP: fp16, bf16, PowerSGD | 1-bit optimizers, until 0.19.6 | none: it adds what it is given |
# | two levels | `comm/hierarchy.py`, or chosen by measurement | a mesh: HSDP | hpZ, qgZ; MiCS until 0.19.6 | rings and trees by its own model of the machine |
# | quantised gathers | int8 by blocks (qwZ) | fp8 all-gather (torchao) | int8 by blocks (qwZ) | |
# | rarely | `LocalSGD`, `DiLoCo`, `no_sync` | `PeriodicModelAverager`, torchft | `no_sync` | |

# %% [markdown]
# ## 5. Measure it
#
# **ZeRO++ on a cable.** ZeRO-3 gathers the weights twice and reduces the gradients once, all of it across. With $M$ for
# the bytes of all 16-bit weights, the paper counts $M$ for each of the three, and for ZeRO++ $0.5\,M$ (qwZ: int8), $0$
# (hpZ: backward gathers from a second shard inside the node) and $0.25\,M$ (qgZ: int4).

# %% tags=["hide-input"]
predict(
    "hpZ on nodes of 8 GPUs keeps each node's weights a second time, in shards. How many bytes a parameter is that on "
    "each GPU, in bf16? (Of all else ZeRO-3 on 64 GPUs keeps 16/64 = 0.25 bytes.)",
    2 / 8,
    unit="bytes",
    why="2 bytes, over the 8 ranks of the node. Memory, for traffic: at 64 GPUs it doubles what a rank keeps.",
)

# %%
# %%ranks 4
from refimpl.zero.zero3 import Zero3

QWZ = {"zero_quantized_weights": True}
HPZ = {"zero_hpz_partition_size": 2}
QGZ = {"zero_quantized_gradients": True}
found = {}
for name, options in {
    "ZeRO-3": {},
    "qwZ": QWZ,
    "hpZ": HPZ,
    "qgZ": QGZ,
    "ZeRO++": {**QWZ, **HPZ, **QGZ},
}.items():
    gpt = model().bfloat16()
    whole = ZeroConfig(param_persistence_threshold=0, **options)
    stage = Zero3(gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-3), slow, whole)
    losses = []
    for step in range(10):
        slow.ledger.reset()
        losses.append(stage.model(*batches.batch(step, rank)))
        stage.backward(losses[-1])
        stage.step()
    crossed = slow.ledger.crossed_bytes("tag")
    weights = sum(size for tag, size in crossed.items() if "parameters" in tag)
    gradients = sum(size for tag, size in crossed.items() if "gradients" in tag)
    node = [
        sum(row[:2]) for row in zip(*group.all_gather_object((weights, gradients)), strict=True)
    ]
    M = 2 * sum(unit.padded for unit in stage.units)
    losses = [loss.item() for loss in losses]
    end = sum(group.all_gather_object(sum(losses[-3:]) / 3)) / 4
    first = end if name == "ZeRO-3" else first
    found[name] = [*node, *(f"{size / M:.2f} M" for size in node), abs(end - first) < 0.2]

# %%
columns = ["weights cross", "gradients cross", "weights", "gradients", "loss as ZeRO-3's"]
pd.DataFrame.from_dict(ranks.pull("found")[0], orient="index", columns=columns)

# %% [markdown]
# (Bytes that leave a node; losses within 0.2 after ten steps.) The paper counts each thing that crosses once, for many
# nodes. With two of them half of everything is at home already, so its $0.25\,M$ is $0.125\,M$ here, plus the scales.
# But ZeRO-3's own collectives are flat: each shard goes to *both* ranks of the other node, twice over the same cable,
# which makes $M/2$ into $M$. `mics_hierarchical_params_gather` mends that, `bytes_across` in the exercises is the
# formula.
#
# Each node, or each group of nodes, may also keep all weights, gradients and optimizer state among its own ranks:
# **MiCS** (`mics_shard_size`), HSDP in PyTorch. Then no gather crosses between groups at all, and gradients do once a
# step, however many micro-batches it has (in FSDP2 if `set_requires_all_reduce(False)` is called for all but the last).
#
# **Is the link used?** A time says nothing by itself. `"comms_logger": {"enabled": true}` in DeepSpeed's JSON prints
# two bandwidths for each collective and size: the *algorithm's*, buffer / time, and the *bus's*, which multiplies by
# what each rank must send for a byte of buffer, so that it can be held against the link. (nccl-tests defines both.
# DeepSpeed prints twice the first of an all-reduce and, up to version 0.19.8, $N$ times both of a reduce-scatter.)

# %% tags=["hide-input"]
predict(
    "8 ranks each hand in 100 MB to an all-gather, which takes 10 ms. Bus bandwidth?",
    100e6 * 8 / 0.01 * 7 / 8 / 1e9,
    unit="GB/s",
    why="The buffer is 8 x 100 MB: 80 GB/s, of which 7/8 had to come over the link. (`bus_bandwidth` in the exercises.)",
)

# %% [markdown]
# **When does it pay?** Compressing takes time. It pays as long as that is less than the time it saves on the link; so there
# is a link speed above which it does not. On this CPU, for a million fp32 numbers on 4 ranks:

# %% tags=["nbval-ignore-output"]
import time

x = torch.randn(1 << 20)
rows = {}
for name, operator in {
    "top 1%": TopK(0.01),
    "int8": Blocks(8),
    "int4": Blocks(4),
    "1 bit": Sign(),
}.items():
    best = []
    for _ in range(3):
        start = time.perf_counter()
        operator.decompress(operator.compress(x), len(x))
        best.append(time.perf_counter() - start)
    gathered = 3 if name == "top 1%" else 2 * 3 / 4
    saved = 2 * 3 / 4 * x.nbytes - gathered * operator.wire_bytes(len(x))
    rows[name] = [
        f"{1e3 * min(best):.1f}",
        f"{saved / 1e6:.1f}",
        f"{8 * saved / min(best) / 1e9:.1f}",
    ]
columns = ["ms to compress and back", "MB not sent", "pays below, Gbit/s"]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# The last column is generous: it counts one rank's work and no overlap. If the transfer was hidden under backward anyway,
# compression gains nothing and its work is in the way. A GPU compresses faster, and has faster links; the question stays the
# same, and the answer inside a node is nearly always no. `refimpl bench compression` runs every method on links of 0.1, 1 and
# 10 Gbit/s, and compares losses after equal *time*, the only fair question.
#
# ## 6. Break it
#
# **Integers added.** The famous bug of every first int8 all-reduce. Each rank has its own scales, the codes are summed, and
# the sum is multiplied by the mean scale. On gradients of four ranks, of which one saw a hard batch:

# %%
# %%ranks 4
torch.manual_seed(rank)
x = torch.randn(4096) * (10.0 if rank == 3 else 1.0)
truth = x.clone()
group.all_reduce(truth)
scales, codes = Blocks(8, block=256).compress(x)
each = group.all_gather_object((scales, codes))
added = sum(q.int() for _, q in each)
spread = sum(s for s, _ in each).div(4).repeat_interleave(256)
first = sum(q * s.repeat_interleave(256) for s, q in each)
for name, total in {"codes added": added * spread, "dequantised first": first}.items():
    away = ((total - truth).norm() / truth.norm()).item()
    angle = torch.cosine_similarity(total, truth, dim=0).item()
    print(f"{name:18} off by {away:.0%}, cosine {angle:.2f}")
print("codes beyond int8:", bool((added.abs() > 127).any()))

# %% [markdown]
# A cosine like this is still a descent direction: the loss goes down, more slowly, and nobody looks. What finds it is a
# test with ranks of *different size*, and bits: dequantised sums agree on all ranks and with one process.
#
# **Adam on one bit.** Adam divides by $\sqrt v$, and $v$ averages squares. A gradient of signs times one scale has the same
# square everywhere.

# %% tags=["hide-input"]
predict(
    "AdamW is fed gradients that went through the 1-bit operator. How many different values has v in a tensor?",
    1,
    unit="values",
    why="Every element of C(g) is plus or minus one scale: v holds the mean of its squares, and says nothing of any weight.",
)

# %%
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.zeros(4096))
sizes = torch.logspace(-3, 0, 4096)  # some weights have gradients 1000 times as large as others
for name, operator in {
    "fp32": None,
    "1 bit, with feedback": ErrorFeedback(Sign(), 4096),
}.items():
    adam = torch.optim.Adam([weight])
    for _ in range(50):
        g = torch.randn(4096) * sizes
        if operator is not None:
            g = Sign().decompress(operator.compress(g), 4096)
        weight.grad = g
        adam.step()
    v = adam.state[weight]["exp_avg_sq"]
    print(f"{name:21} more than one value in v: {v.unique().numel() > 1}", end=", ")
    print(f"the largest {'1' if v.max() == v.min() else 'more than 1000'} times the least")

# %% [markdown]
# Errors cancel in sums, not in squares. So **1-bit Adam** runs Adam for a warm-up, *freezes* $v$, and from then on
# compresses the momentum, which is linear in the gradients. 0/1 Adam updates $v$ ever more rarely before it freezes it,
# and later skips exchanges; 1-bit LAMB also freezes a mean of each layer's ratio, and scales that from then on by a
# variance that it finds again in the momentum. (Under ZeRO LAMB's ratios need norms of parameters that are cut over
# ranks: `trust_ratios` in the exercises.) In refimpl all three are under DDP, by DeepSpeed's JSON: `{"optimizer":
# {"type": "OneBitAdam", "params": {"freeze_step": 100}}}`.
#
# Other ways to lose a day: an error that survives a **skipped step** (an fp16 overflow: what was received was thrown away, so the
# error must go back); an error that is **not in the checkpoint**; a second shard that outlives the optimizer's step (`SecondShard`
# in the exercises: the loss is that of weights that are one step old); AdamW's state averaged along in DiLoCo, or not the
# outer momentum after a resume.
#
# ## 7. Prove it
#
# - **Exercises:** [exercises/10_communication](../exercises/10_communication/exercise.py): `pytest exercises/10_communication`
# - **Quiz:** `refimpl quiz --topic communication`, `refimpl quiz --topic advanced`, or `Quiz("communication")` of
#   `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/comm/test_link.py](../tests/comm/test_link.py) (bandwidth, latency, what crosses),
#   [tests/compress](../tests/compress/test_operators.py) (contraction, wire bytes, feedback),
#   [tests/comm/test_hierarchy.py](../tests/comm/test_hierarchy.py) and
#   [test_level_model.py](../tests/comm/test_level_model.py) (bytes near and far, messages played one by one),
#   [tests/zero/test_plus.py](../tests/zero/test_plus.py) (the paper's table between nodes),
#   [tests/zero/test_one_bit.py](../tests/zero/test_one_bit.py) and [test_lamb.py](../tests/zero/test_lamb.py),
#   [tests/optim/test_local_sgd.py](../tests/optim/test_local_sgd.py).
# - **Code:** [link.py](../refimpl/comm/link.py), [hierarchy.py](../refimpl/comm/hierarchy.py),
#   [halving.py](../refimpl/comm/halving.py), [tree.py](../refimpl/comm/tree.py),
#   [level_model.py](../refimpl/comm/level_model.py), [compress/](../refimpl/compress/compressor.py),
#   [plus.py](../refimpl/zero/gather/plus.py), [one_bit_adam.py](../refimpl/optim/one_bit_adam.py),
#   [diloco.py](../refimpl/optim/diloco.py).
# - **DeepSpeed:**
#   [deepspeed/runtime/comm/coalesced_collectives.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/comm/coalesced_collectives.py)
#   (qgZ). Its 1-bit optimizers and MiCS were removed in 0.19.7.
# - **Papers:** Karimireddy et al. 2019, [arXiv:1901.09847](https://arxiv.org/abs/1901.09847) (error feedback). Lin et al. 2017,
#   [arXiv:1712.01887](https://arxiv.org/abs/1712.01887) and Stich et al. 2018,
#   [arXiv:1809.07599](https://arxiv.org/abs/1809.07599) (top-k). Vogels et al. 2019,
#   [arXiv:1905.13727](https://arxiv.org/abs/1905.13727) (PowerSGD). Tang et al. 2021,
#   [arXiv:2102.02888](https://arxiv.org/abs/2102.02888) (1-bit Adam). Li et al. 2021,
#   [arXiv:2104.06069](https://arxiv.org/abs/2104.06069) (1-bit LAMB). Lu et al. 2022,
#   [arXiv:2202.06009](https://arxiv.org/abs/2202.06009) (0/1 Adam). Wang et al. 2023,
#   [arXiv:2306.10209](https://arxiv.org/abs/2306.10209) (ZeRO++). Zhang et al. 2022,
#   [arXiv:2205.00119](https://arxiv.org/abs/2205.00119) (MiCS). Douillard et al. 2023,
#   [arXiv:2311.08105](https://arxiv.org/abs/2311.08105) (DiLoCo). Thakur, Rabenseifner and Gropp 2005, IJHPCA 19(1)
#   (halving and doubling).
