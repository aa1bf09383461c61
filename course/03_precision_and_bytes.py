# %% [markdown]
# # 3 · Precision and bytes: where 16 bytes a parameter go
#
# Numbers of 16 bits take half the memory and half the traffic of fp32, and GPUs multiply them faster. They also lose
# things: small updates, small gradients, or large ones. This chapter shows each loss on a model that trains, and the
# two remedies that everybody uses: **master weights** and **loss scaling**. Then it counts what 16 bits save. It is not
# what most people expect. At the end numbers get 8 bits.

# %% [markdown]
# ## 1. The pain: half the bytes, half the learning
#
# Chapter 2 ended with 16 bytes a parameter on every rank: 120 GB for a model of 7.5 billion. The obvious remedy is
# `model.to(torch.bfloat16)`. Count what one step leaves in memory:

# %%
# %load_ext refimpl.notebook
import copy
import math
from itertools import pairwise

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.optim import AdamW

from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig, Linear
from refimpl.notebook import show

torch.set_num_threads(1)
shape = GPTConfig(context=64, width=64, layers=2, heads=2)
batches = Batches(corpus(), context=64, size=8)


def counted(dtype):
    model = GPT(shape).to(dtype)
    optimizer = AdamW(model.parameters())
    model(*batches.batch(0, 0)).backward()
    optimizer.step()

    def owned():
        return {
            "parameters": list(model.parameters()),
            "gradients": [p.grad for p in model.parameters()],
            "optimizer": [
                t for state in optimizer.state.values() for t in state.values() if t.numel() > 1
            ],
        }

    sizes = MemoryMeter(owned).now()
    return {name: sizes[name] / shape.parameters for name in owned()}


table = pd.DataFrame(
    {str(dtype)[6:]: counted(dtype) for dtype in (torch.float32, torch.bfloat16)}
)
table.loc["bytes a parameter"] = table.sum()
table

# %% [markdown]
# Half. Now train it. A model that has learned for 60 steps goes on for 120 more with a learning rate of 0.0001, once
# in fp32 and once in bf16. `exam` is 32 pieces of text drawn for grading alone.

# %%
torch.manual_seed(0)
started = GPT(shape)
optimizer = AdamW(started.parameters(), lr=3e-3)
for step in range(60):
    started(*batches.batch(step, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
exam = Batches(corpus(), context=64, size=32).batch(10_000, 0)


class Plain:
    """The optimizer works on the model's own weights."""

    def __init__(self, model):
        self.optimizer = AdamW(model.parameters(), lr=1e-4)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def go_on(dtype, updater, steps=120):
    """Loss on the exam every 10 steps, and the share of weights that never moved, by kind."""
    model = copy.deepcopy(started).to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    update, losses = updater(model), []
    for step in range(steps):
        model(*batches.batch(100 + step, 0)).backward()
        update.step()
        if step % 10 == 9:
            with torch.no_grad():
                losses.append(model(*exam).item())
    same = [(old == new) for old, new in zip(before, model.parameters(), strict=True)]
    norms = [
        s
        for s, (name, _) in zip(same, model.named_parameters(), strict=True)
        if "ln" in name and "weight" in name
    ]

    def share(masks):
        return torch.cat([mask.flatten() for mask in masks]).float().mean().item()

    return losses, {"all weights": share(same), "norm weights": share(norms)}


runs = {"fp32": go_on(torch.float32, Plain), "bf16": go_on(torch.bfloat16, Plain)}
for name, (_, unmoved) in runs.items():
    print(
        f"{name}: {unmoved['norm weights']:.0%} of the norms' weights never moved in 120 steps"
    )

# %% tags=["nbval-ignore-output", "hide-input"]
with torch.no_grad():
    begin = started(*exam).item()
rows = [
    [begin, losses[-1], begin - losses[-1], unmoved["all weights"]]
    for losses, unmoved in runs.values()
]
pd.DataFrame(
    rows, runs, ["loss before", "loss after", "learned", "weights that never moved"]
).round(3)

# %% [markdown]
# In bf16 the same 120 steps teach the model little more than half as much, and nothing says so: no NaN, no error, a
# loss that falls. A third of all weights is exactly where it was, and of the layer norms' weights every one.

# %% [markdown]
# ## 2. The idea: keep small things where there is room
#
# A floating-point number is $\pm\, 2^{e} \cdot (1 + m)$. The bits of the exponent $e$ decide how far the numbers reach,
# the bits of the mantissa $m$ how densely they lie. fp16 and bf16 cut 16 bits differently.

# %% tags=["hide-input"]
rows = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    mantissa = round(-torch.log2(torch.tensor(info.eps)).item())
    rows[str(dtype)[6:]] = {
        "exponent bits": info.bits - 1 - mantissa,
        "mantissa bits": mantissa,
        "largest": f"{info.max:.3g}",
        "smallest normal": f"{info.smallest_normal:.3g}",
        "smallest": f"{info.smallest_normal * info.eps:.3g}",
        "gap above 1 (eps)": f"{info.eps:.3g}",
    }
pd.DataFrame(rows).T

# %% [markdown]
# bf16 reaches as far as fp32, with 2 to 3 decimal digits. fp16 has one digit more and ends at 65504. (Below the smallest
# normal number come the subnormal ones, which have fewer and fewer digits, down to the smallest of all.) Between $2^k$
# and $2^{k+1}$ the numbers lie $2^k \epsilon$ apart, so an update $u$ of a weight $w$ is rounded away when
#
# $$ |u| \;<\; \tfrac12\, \epsilon \cdot 2^{\lfloor \log_2 |w| \rfloor} $$
#
# (From an exact power of two towards zero half of that is enough: the gap below is half as wide.) A weight of 1 needs an
# update of more than 0.0039 to move up in bf16. Adam's updates are about as large as the learning rate: 0.0001.
#
# ```mermaid
# flowchart LR
#   m["master weights, fp32<br/>Adam's two means, fp32"] -->|round| w["weights, 16 bits"]
#   w --> fb["forward, backward"]
#   s["loss x scale<br/>(fp16 only)"] --> fb
#   fb --> g["gradients, 16 bits"]
#   g -->|"all-reduce, then / scale"| m
# ```
#
# **Master weights**: keep the weights a second time in fp32, update those, and round them to 16 bits for the next
# forward. Small updates add up in fp32 until they are large enough to show. **Loss scaling**: multiply the loss before
# backward, so that all gradients grow by that factor and stay above fp16's smallest number; divide by it in fp32.

# %% [markdown]
# ## 3. Build it
#
# The rounding, with bare numbers: start at 1 and add 0.0001 a thousand times.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "Start at 1 in bf16 and add 0.0001 a thousand times. Where does it end?",
    1,
    why="The next number above 1 is 1.0078: what is less than half of that away is rounded back.",
)

# %%
ends = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for begin_at in (1.0, 0.02):
        w = torch.tensor(begin_at, dtype=dtype)
        for _ in range(1000):
            w += 1e-4
        ends[str(dtype)[6:], f"from {begin_at}"] = round(w.item(), 3)
pd.Series(ends).unstack().loc[["float32", "float16", "bfloat16"]]

# %% [markdown]
# From 1, both 16-bit formats stay at 1. From 0.02 they move, because small numbers lie closer. fp16 ends too high,
# since every sum was rounded, and bf16 stops at 0.031: from $2^{-5} = 0.03125$ on, half a gap is more than the update.
#
# **Master weights** are your turn. Write the class and run the cell: it is saved in your exercise's file and graded in a
# second or two. `%hint 03_precision_and_bytes MasterWeights` helps.


# %%
# %%task 03_precision_and_bytes MasterWeights
class MasterWeights:
    """An fp32 copy of 16-bit parameters that the optimizer updates, so that small updates are
    not rounded away.

    Memory: 4 bytes a parameter for the masters and 8 for Adam's state, all fp32; nothing else
    is kept. The parameters keep their memory: others may hold views of it.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], optim.Optimizer],
    ) -> None:
        """Make self.masters, fp32 parameters like `params`, and
        self.optimizer = make_optimizer(self.masters).
        """
        raise NotImplementedError("MasterWeights.__init__")

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        """Update the masters with `grads` (fp32), round them into the parameters, and keep no
        gradient alive.
        """
        raise NotImplementedError("MasterWeights.step")


# %% [markdown]
# Put to work, on the run from above. (`yours` brings your class, once it has passed, and until then one that does the
# same; `scale` is for later.)

# %%
from refimpl.notebook.yours import yours

MasterWeights = yours("03_precision_and_bytes", "MasterWeights")


class Master:
    """The optimizer works on fp32 copies; the model gets them rounded."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        self.inside = MasterWeights(self.weights, lambda masters: AdamW(masters, lr=1e-4))

    def step(self, scale=1.0):
        self.inside.step([w.grad.float() / scale for w in self.weights])


runs["bf16 + master"] = go_on(torch.bfloat16, Master)
lost = abs(runs["bf16 + master"][0][-1] - runs["fp32"][0][-1]) / (begin - runs["fp32"][0][-1])
print("with master weights bf16 learns what fp32 learns, within 5%:", lost < 0.05)

# %% tags=["hide-input"] alt="Loss on the exam over 120 steps: bf16 with master weights lies on fp32, bf16 alone falls half as fast"
figure, axis = show.figure(3)
for (name, (losses, _)), style in zip(runs.items(), ("-", "-", "--"), strict=True):
    axis.plot([0, *range(10, 121, 10)], [begin, *losses], style, marker=".", label=name)
axis.set(xlabel="step", ylabel="loss on the exam (nats)")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# **Small gradients.** The loss is a mean over tokens, so backward starts with numbers of about 1 / tokens, and most get
# smaller on their way down. With $A$ micro-batches a step the loss is divided by $A$ as well. Count the elements of the
# weights' gradients that come out as exactly zero. (In fp32 none is.)


# %% tags=["hide-input"]
predict(
    "Which of the two loses small gradients to zero?",
    "fp16",
    options=["bf16", "fp16"],
    why="bf16 has the exponent of fp32, so it reaches as far down.",
)


# %%
def gradients(dtype, factor):
    model = copy.deepcopy(started).to(dtype)
    (model(*batches.batch(500, 0)) * factor).backward()
    return torch.cat([p.grad.flatten().float() for p in model.parameters()])


def zeros(dtype, factor):
    return (gradients(dtype, factor) == 0).float().mean().item()


rows = {}
for micro_batches in (1, 64, 4096):
    rows[f"loss / {micro_batches}"] = {
        "fp32": zeros(torch.float32, 1 / micro_batches),
        "bf16": zeros(torch.bfloat16, 1 / micro_batches),
        "fp16": zeros(torch.float16, 1 / micro_batches),
        "fp16, loss x 65536": zeros(torch.float16, 2.0**16 / micro_batches),
    }
lost_by = pd.DataFrame(rows).T
print("bf16 loses less than 1 in 1000:", (lost_by["bf16"] < 1e-3).all())
print("fp16 loses more as the loss gets smaller:", lost_by["fp16"].is_monotonic_increasing)
print(
    "a scale of 65536 saves all but 1 in 1000, even of loss / 64:",
    lost_by["fp16, loss x 65536"].iloc[1] < 1e-3,
)

# %% tags=["nbval-ignore-output", "hide-input"]
lost_by.map("{:.2%}".format)

# %% [markdown]
# fp16's smallest number is $2^{-24}$, and what is smaller than half of it becomes zero. bf16 has fp32's exponent, so
# its numbers go down to $10^{-40}$: **bf16 needs no loss scaling.** That, and not accuracy, is why it has replaced
# fp16.
#
# The picture shows where the gradients lie: those of the activations, from which all others are made. Scaling moves
# the whole hill to the right by 16 powers of two. The room to the right is not endless either, and the gradient of a
# weight is a sum over all tokens, so it lies further right than this hill.

# %% tags=["hide-input"] alt="Histogram of the gradients' exponents, plain and scaled by 65536, between the limits of fp16"
flowing = []
probe = copy.deepcopy(started)
for module in probe.modules():
    if isinstance(module, torch.nn.Linear):
        module.register_full_backward_hook(
            lambda module, inputs, outputs: flowing.append(outputs[0].flatten())
        )
probe(*batches.batch(500, 0)).backward()
exponents = torch.cat(flowing).abs().log2()

figure, axis = show.figure(3.4)
for shift, label, color in ((0, "as they are", "tab:blue"), (16, "loss x 65536", "tab:orange")):
    axis.hist(
        (exponents + shift).numpy(), bins=range(-46, 20), alpha=0.6, label=label, color=color
    )
axis.axvspan(-46, -25, color="black", alpha=0.08)
axis.axvspan(-25, -14, color="black", alpha=0.04)
axis.axvspan(16, 20, color="red", alpha=0.15)
top = axis.get_ylim()[1] * 1.12
for at, text in ((-35, "zero in fp16"), (-19, "fewer digits"), (18, "Inf")):
    axis.text(at, top * 0.97, text, ha="center", va="top", fontsize=9)
axis.set(
    xlabel="power of two", ylabel="gradients of activations", xlim=(-46, 20), ylim=(0, top)
)
figure.legend(loc="outside upper center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# **Where sums are made.** A sum of many small numbers loses what a small update loses: beside a large sum they are too
# small to count. So 16 bits are for numbers that are stored and sent, and what is *added* is added in fp32. That
# happens in three places. Inside a matrix product the GPU's hardware does it, on a CPU the library:

# %%
small, ones = (
    torch.full((1, 4096), 0.01, dtype=torch.bfloat16),
    torch.ones(4096, 1, dtype=torch.bfloat16),
)
one_by_one = torch.zeros(1, dtype=torch.bfloat16)
for number in small[0]:
    one_by_one += number
print(
    "4096 times 0.01: a bf16 product says",
    (small @ ones).item(),
    "| bf16 additions say",
    one_by_one.item(),
)

# %% [markdown]
# The second place is the gradient of many micro-batches, which are added one by one just like that (`grad_accum_dtype`
# in DeepSpeed's JSON; Megatron keeps an fp32 `main_grad`). The third is the sum over ranks. A ring rounds the partial
# sum to bf16 at each of its $N-1$ hops. `Group` sends bf16 too, but adds the $N$ contributions in fp32 and rounds once:

# %%
# %%ranks 4
from refimpl.comm import ring

mine = torch.randn(100_000, generator=torch.Generator().manual_seed(rank)).bfloat16()
exact = mine.double()
group.all_reduce(exact)
for name, way in {
    "ring, rounded at each hop": ring.all_reduce,
    "Group, rounded once": type(group).all_reduce,
}.items():
    total = mine.clone()
    way(group, total)
    print(f"{name:26} error {((total - exact).norm() / exact.norm()).item():.2%}")

# %% [markdown]
# On 4 ranks the ring is a little worse, on 1000 much. Who cannot choose how the library adds, chooses what is sent: the
# **reduction dtype** (`communication_data_type` in DeepSpeed, `reduce_dtype` in the `MixedPrecisionPolicy` of FSDP2,
# torch's own sharded training) may be fp32 where parameters are bf16, and costs twice the bytes.
#
# **Which scale?** The largest that does not overflow; and that changes while training goes on. So try: double after a
# while without trouble, halve at an overflow, and throw the step with the overflow away. Its gradients are Inf, there
# is nothing to save. (In torch this is `torch.amp.GradScaler`, which doubles after 2000 good steps and halves at every
# overflow.) The task has DeepSpeed's rules, with a `hysteresis`: how many overflows it takes until one halves.
# `%hint 03_precision_and_bytes DynamicLossScaler` helps.


# %%
# %%task 03_precision_and_bytes DynamicLossScaler
class DynamicLossScaler:
    """Finds the largest loss scale at which fp16 gradients do not overflow.

    The scale doubles on the good step that follows `window` good ones in a row, and again after
    every `window` more. The first `hysteresis` - 1 overflows are endured; every one after them
    halves the scale, until a doubling allows `hysteresis` - 1 again. The scale begins as a
    power of two, at least 1, and stays a power of two. Where it would halve a scale of 1 it
    raises OverflowError: the loss itself is not finite.
    """

    def __init__(self, scale: float = 2**16, window: int = 1000, hysteresis: int = 2):  # given
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.left = hysteresis  # the overflow that finds 1 left halves the scale
        self.good_steps = 0  # since the last overflow

    def update(self, overflow: bool) -> None:
        """Tell the scaler how the step went. OverflowError if the scale should go below 1."""
        raise NotImplementedError("DynamicLossScaler.update")


# %% [markdown]
# And who says whether a step has overflowed? With several ranks all must hear the same answer, or one skips the step
# that the others take (section 6). `%hint 03_precision_and_bytes overflowed` helps.


# %%
# %%task 03_precision_and_bytes overflowed
def overflowed(group: Group, grads: Sequence[Tensor]) -> bool:
    """Whether any gradient on any rank holds Inf or NaN: the same answer on all ranks, so that
    all skip the step.

    `grads` may be empty on some ranks. One all-reduce of one number.
    """
    raise NotImplementedError("overflowed")


# %% [markdown]
# Both in a loop, from a scale that is far too high, on a group of one rank:


# %%
class Alone:
    """A group in which nobody else has anything to add."""

    rank, size = 0, 1

    def all_reduce(self, x, op="sum"):
        pass


Scaler = yours("03_precision_and_bytes", "DynamicLossScaler")
overflowed = yours("03_precision_and_bytes", "overflowed")
model = copy.deepcopy(started).half()
master, scaler, told = Master(model), Scaler(2.0**24, window=6, hysteresis=1), []
for step in range(24):
    (model(*batches.batch(step, 0)) * scaler.scale).backward()
    overflow = overflowed(Alone(), [p.grad for p in model.parameters()])
    if overflow:
        model.zero_grad()
    else:
        master.step(scaler.scale)  # divides in fp32: what was lifted must not sink again
    told.append("skip" if overflow else "step")
    scaler.update(overflow)
print("begins with a skip:", told[0] == "skip", "| ends up stepping:", "step" in told)

# %% tags=["nbval-ignore-output", "hide-input"]
print(" ".join(told))

# %% [markdown]
# ## 4. Read it
#
# refimpl's `DynamicLossScaler` ([refimpl/optim/loss_scale.py](../refimpl/optim/loss_scale.py)) has the same rules. With
# `hysteresis` $h$, the first $h - 1$ overflows are endured and the next one halves the scale (by default $h$ = 2: a
# single bad batch is no reason). An overflow at `min_scale` raises an error, because then it is not the scale's fault.
# Here it is told of 14 steps, with $h$ = 2 and a window of 3:

# %%
from refimpl.optim.loss_scale import DynamicLossScaler

patient, rows = DynamicLossScaler(initial_scale=1024.0, window=3, hysteresis=2), {}
for number, overflow in enumerate([0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0]):
    patient.update(bool(overflow))
    rows[number] = ["overflow" if overflow else "", int(patient.scale)]
pd.DataFrame.from_dict(rows, orient="index", columns=["", "scale afterwards"]).T

# %% [markdown]
# Step 3, the fourth good one in a row, doubles. The overflow of step 4 is endured, 5 and 6 halve. Step 10 doubles, and
# with that one overflow is free again: step 11 does not halve.

# %% [markdown]
# The master weights live in `Update`, which all strategies share. `prepare` and `apply` are your loop: check, skip or
# unscale, step, and `publish` rounds the masters into the model. (`adopt` is for weights that somebody wrote
# meanwhile.)

# %%
from refimpl.zero.update import Update

show.source(Update.prepare, Update.apply, Update.publish)

# %% [markdown]
# One number does three jobs here: the sum of all gradients' squares. Its root is the norm for clipping, it is finite only
# if every gradient is, and it is the same on all ranks. Unscaling and clipping are one multiplication.

# %% [markdown]
# ## 5. Measure it
#
# **State.** `refimpl.DDP` on 2 ranks in three dtypes, counted between backward and update, beside the formula.

# %% tags=["hide-input"]
predict(
    "bf16 weights and gradients, AdamW with fp32 masters. "
    "How many bytes a parameter, beside 16 in fp32?",
    2 + 2 + 8 + 4,
    unit="bytes",
)

# %%
from refimpl import DDP, Group, run
from refimpl.notebook import twin
from refimpl.plan.formulas import Layout, by_collective, memory_bytes, traffic

rows, equal = {}, True
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    ddp = twin.measure("ddp", shape, ranks=2, dtype=dtype)
    layout, expected = ddp.layout, memory_bytes("ddp", 2, dtype.itemsize, ddp.layout)
    formula = by_collective(traffic("ddp", 2, dtype.itemsize, layout))
    equal &= all(ddp.kept[name] == expected[name] for name in expected) and ddp.sent == formula
    rows[str(dtype)[6:]] = {name: ddp.kept[name] for name in expected}
    rows[str(dtype)[6:]] |= {
        "state": sum(ddp.kept[n] for n in expected),
        "sent a step": ddp.sent["all_reduce"],
    }
print("counted = formula, to the byte:", equal)
(pd.DataFrame(rows) / layout.numel).round(2).rename_axis("bytes a parameter")

# %% [markdown]
# Read the row `state`. **Mixed precision saves no state at all**: 4 + 4 + 8 has become 2 + 2 + 8 + 4. What the weights
# and gradients save, the master weights take back. 16 bits do save two other things: half of the bytes sent (the last
# row), and half of the activations, which come next.
#
# **Activations**: what forward keeps for backward. For one block the formula of `refimpl.plan.transformer` counts 16
# numbers a token and unit of width (the file lists them), and a few for each norm and head. Here is one block under the
# meter.

# %%
from refimpl.model.gpt import Block
from refimpl.plan.transformer import activation_bytes

block = Block(shape)
x = torch.randn(8, shape.context, shape.width, requires_grad=True)


def kept_by(block, x):
    """Bytes of the storages that autograd saves in forward, weights aside."""
    weights = {p.data_ptr() for p in block.parameters()}
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


show.compare(
    formula={"one block": activation_bytes(shape, 8, itemsize=4)},
    counted={"one block": kept_by(block, x)},
)

# %% [markdown]
# And the whole model, with `MemoryMeter` watching a step. Activations grow through forward, stand highest at its end,
# and are gone after backward.

# %%
model, batch = GPT(shape), batches.batch(0, 0)
with MemoryMeter(lambda: {"parameters": list(model.parameters())}) as meter:
    loss = model(*batch)
    after_forward = meter.sample()["activations"]
    loss.backward()
    del loss
    after_backward = meter.sample()["activations"]
blocks = shape.layers * activation_bytes(shape, 8, itemsize=4)
tokens = 8 * shape.context
rest = (after_forward - blocks) / tokens / 4
print(
    f"after forward  {after_forward:,} bytes, of which {blocks:,} are the {shape.layers} blocks'"
)
print(f"the rest:      {rest:.2f} numbers a token")
print(f"after backward {after_backward:,} bytes")

# %% [markdown]
# What is the rest? The softmax over 256 possible bytes, 64 numbers going into the last norm and 64 coming out,
# two for its statistics, and the target (8 bytes, so two more). The remaining quarter are the 64 positions and the loss
# itself. State grows with the parameters alone. Activations grow with the tokens in flight, times width and layers, and
# in 16 bits they halve. That is where the memory is won.
#
# **Autocast** is the other way to mixed precision: the model stays fp32, and inside `torch.autocast` each operation
# chooses. Products round their inputs to bf16; norms and the loss stay fp32, on a GPU softmax too. So the fp32 weights
# *are* the masters. Here are the two ways beside plain fp32, with DDP on 2 ranks; activations are those of one block,
# in bytes for each token and unit of width:

# %% tags=["nbval-ignore-output"]
rows = {}
for name, dtype, autocast in (
    ("fp32", torch.float32, False),
    ("autocast", torch.float32, True),
    ("bf16 + master", torch.bfloat16, False),
):
    ddp = twin.measure("ddp", shape, ranks=2, dtype=dtype, autocast=autocast)
    state = sum(
        ddp.kept[name] for name in ("parameters", "gradients", "optimizer", "master weights")
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        activations = kept_by(Block(shape).to(dtype), x.detach().to(dtype).requires_grad_())
    rows[name] = {
        "state, bytes a parameter": state / ddp.layout.numel,
        "sent, bytes a parameter": ddp.sent["all_reduce"] / ddp.layout.numel,
        "activations": activations / x.numel(),
    }
pd.DataFrame(rows).round(1).T

# %% [markdown]
# Autocast's gradients are fp32, so it sends twice the bytes, and its activations are a mixture: the inputs of the norms
# are fp32, and the 16-bit copies of the weights, made anew in each forward, are kept for backward as well. It is safer,
# because nothing is rounded that does badly with it, and pays for it with casts and bytes. ZeRO and FSDP mostly train
# the other way: 16-bit weights that are gathered, fp32 masters that are sharded.
#
# Turn the knobs: model, precision, sequences of 2048 tokens in flight. The bars are GB on one rank under DDP.

# %% tags=["hide-input"]
from refimpl.notebook.widgets import Knobs

# Layers, width and heads of GPT-3's family, arXiv:2005.14165, table 2.1. Two of its numbers do not multiply to the width
# (24 heads of 128 at 1.3B, a width of 5140 at 13B): here they do.
MODELS = {
    "1.3B": (24, 2048, 16),
    "125M": (12, 768, 12),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "175B": (96, 12288, 96),
}


def gigabytes(model, precision, sequences):
    layers, width, heads = MODELS[model]
    config = GPTConfig(vocab=50257, context=2048, width=width, layers=layers, heads=heads)
    itemsize = 4 if precision == "fp32" else 2
    sizes = memory_bytes("ddp", 1, itemsize, Layout(config.parameters, 0, 0))
    if precision == "bf16 alone":
        sizes |= {"optimizer": sizes["optimizer"] // 2, "master weights": 0}
    sizes["activations"] = layers * activation_bytes(config, sequences, itemsize)
    return {name: size / 1e9 for name, size in sizes.items()}


def draw(**knobs):
    figure, axis = show.figure(2.4)
    left = 0.0
    for name, size in gigabytes(**knobs).items():
        axis.barh(0, size, left=left, label=f"{name} {size:.1f}")
        left += size
    axis.axvline(80, color="black", linestyle="--", linewidth=1)
    axis.text(80, 0.42, " 80 GB", va="bottom", fontsize=9)
    axis.set(
        yticks=[],
        xlim=(0, max(90, left * 1.05)),
        ylim=(-0.5, 0.7),
        xlabel=f"GB ({left:.1f} in all)",
    )
    figure.legend(ncols=2, loc="outside upper center", frameon=False, fontsize=9)
    return figure


precisions = ["bf16 + master", "fp32", "bf16 alone"]
table = pd.DataFrame(
    [
        {"model": m, "precision": p} | {k: round(v, 1) for k, v in gigabytes(m, p, 4).items()}
        for m in ("125M", "1.3B", "6.7B", "13B")
        for p in precisions[:2]
    ]
)
Knobs(draw, table, model=list(MODELS), precision=precisions, sequences=[4, 1, 2, 8, 16])

# %% [markdown]
# **Is it fast?** A step does about $6\Psi$ floating-point operations (FLOPs) a token. Divided by what the hardware
# could have done in the time of the step, that is the **model FLOPs utilization**, MFU. It counts what the model needs,
# not what was done: recomputed activations do not raise it. Large trainings have told of 38 to 43% (Llama 3, 405B), 46%
# (PaLM, on TPUs) and 55% (MegaScale). Here against this core's own best product, in fp32:

# %% tags=["nbval-ignore-output"]
from refimpl.measure.clock import Clock
from refimpl.plan.transformer import flops_per_token


def billions_a_second(operations, work):
    clock = Clock(warmup=1)
    for _ in range(5):
        with clock.time():
            work()
    return operations / min(clock.ms["step"]) / 1e6


square, rows = torch.rand(1024, 1024), {}
peak = billions_a_second(2 * 1024**3, lambda: square @ square)
for width in (16, 64, 256):
    config = GPTConfig(context=64, width=width, layers=2, heads=2)
    model = GPT(config)
    done = billions_a_second(
        flops_per_token(config) * 8 * 64, lambda m=model: m(*batches.batch(0, 0)).backward()
    )
    rows[width] = {
        "parameters": f"{config.parameters:,}",
        "billion operations/s": round(done),
        "MFU": f"{done / peak:.0%}",
    }
pd.DataFrame(rows).T.rename_axis("width")

# %% [markdown]
# The wider, the better: products grow with the square of the width, and everything element-wise (chapter 0:
# memory-bound) with the width alone.
#
# **Loss scaling, live.** fp16 on 2 ranks with `DynamicLossScaler`, from a scale that is far too high. With `window=12`
# it tries a larger scale after 12 good steps; the default is 1000.


# %%
def train_fp16(steps=72):
    group, model = Group.world(), copy.deepcopy(started).half()
    scaler = DynamicLossScaler(initial_scale=2.0**24, window=12, hysteresis=1)
    ddp = DDP(model, AdamW(model.parameters(), lr=1e-3), group, scaler=scaler)
    history = []
    for step in range(steps):
        scale = scaler.scale
        ddp.backward(model(*batches.batch(step, group.rank)))
        history.append((scale, ddp.step()))
    return history


one, two = run(train_fp16, ranks=2)
skips = sum(not stepped for _, stepped in one)
print("both ranks have the same scales and skips:", one == two)
scales = [scale for scale, _ in one]
print(
    "it came down, and went up again:",
    scales[0] > min(scales),
    any(b > a for a, b in pairwise(scales)),
)
print("most steps count:", skips < len(one) / 3)

# %% tags=["nbval-ignore-output", "hide-input"] alt="The loss scale over 72 steps: it halves at each overflow and doubles after 12 good steps"
figure, axis = show.figure(3)
axis.step(range(len(one)), scales, where="post")
skipped = [(step, scale) for step, (scale, stepped) in enumerate(one) if not stepped]
axis.scatter(
    *zip(*skipped, strict=True),
    color="tab:red",
    marker="x",
    zorder=3,
    label=f"overflow: skipped ({skips})",
)
axis.set_yscale("log", base=2)
axis.set(xlabel="step", ylabel="loss scale")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# It halves until the gradients fit, then stays just below the limit: every 12 good steps it doubles, and mostly halves
# again at once. Each such try costs one skipped step.

# %% [markdown]
# **Half again: fp8.** GPUs since 2022 (sm_89 and later) multiply numbers of 8 bits twice as fast as those of 16. The bits
# are cut in two ways, named after exponent and mantissa:

# %% tags=["hide-input"]
FP8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
rows = {}
for name, dtype in FP8.items():
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    rows[name] = {
        "largest": f"{info.max:.0f}",
        "smallest": f"{smallest:.2g}",
        "powers of two": 1 + math.floor(math.log2(info.max)) - round(math.log2(smallest)),
        "gap above 1 (eps)": f"{info.eps}",
    }
pd.DataFrame(rows).T

# %% [markdown]
# No model can be kept in so few bits, but the **operands** of its large products can be brought there: in each linear
# layer input and weight for forward, and the gradient of the output for backward. The products are added in 32 bits.
# (Hopper's tensor cores keep about 14 bits of such a sum, so DeepSeek-V3 moves it into fp32 every 128 terms.) Norms,
# softmax, the head, master weights and Adam's state stay as they were, and so do the bytes of state. What shrinks is the
# time, what linear layers keep for backward, and what is sent where weights are gathered in 8 bits (chapter 10).
#
# Eighteen powers of two are few, bf16 has more than 250. So each tensor gets a **scale**: divided by it, the largest
# number becomes the largest of the format, and the product is multiplied by both scales. Below, operands are rounded
# to 8 bits and multiplied in fp32: what the hardware gives, but for the order of its sums.


# %%
LARGEST = {torch.int8: 127.0} | {dtype: torch.finfo(dtype).max for dtype in FP8.values()}


def rounded(x, dtype, block=None):
    """x rounded to `dtype`: with one scale (None), one for each `block` of a row, or none (0)."""
    rows = x.reshape(1, -1) if not block else x.unflatten(-1, (-1, block))
    scale = rows.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    scale = torch.where((scale == 0) | (block == 0), 1.0, scale)
    units = (rows / scale).round() if dtype == torch.int8 else rows / scale
    return (units.to(dtype).float() * scale).view_as(x)


class Product(torch.autograd.Function):
    """x [..., inputs] by w [outputs, inputs]: all three products take rounded operands."""

    @staticmethod
    def forward(ctx, x, w, forward_dtype, backward_dtype, block):
        x, w = rounded(x, forward_dtype, block), rounded(w, forward_dtype, block)
        ctx.save_for_backward(x, w)
        ctx.rounded = lambda dy: rounded(dy, backward_dtype, block)
        return x @ w.T

    @staticmethod
    def backward(ctx, dy):
        (x, w), dy = ctx.saved_tensors, ctx.rounded(dy)
        return dy @ w, dy.flatten(0, -2).T @ x.flatten(0, -2), None, None, None


def in_8_bits(model, *how):
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and name != "head":
            layer.multiply = lambda x, w, bias: Product.apply(x, w, *how) + bias
    return model


# %% [markdown]
# The run from section 1 again, 60 of its steps, with fp32 weights and AdamW throughout.

# %% tags=["hide-input"]
predict(
    "Without a scale, where does E4M3 do more harm?",
    "in the gradients",
    options=["in the weights", "in the gradients"],
    why="Below 2**-10 all is zero, and most gradients of activations lie far below: see the hill above.",
)

# %%
E4M3, E5M2 = FP8.values()
ways = {
    "E4M3, no scale": (E4M3, E4M3, 0),
    "E4M3, gradients E5M2, no scale": (E4M3, E5M2, 0),
    "E4M3, a scale a tensor": (E4M3, E4M3, None),
    "E4M3, a scale for 32 numbers": (E4M3, E4M3, 32),
}
ends = {"fp32": runs["fp32"][0][5]}
for name, how in ways.items():
    losses, _ = go_on(torch.float32, lambda model, how=how: Plain(in_8_bits(model, *how)), 60)
    ends[name] = losses[-1]
learned = {name: (begin - end) / (begin - ends["fp32"]) for name, end in ends.items()}
bare, wide, *scaled = list(learned.values())[1:]
print("no scale, E4M3: less than 60% of what fp32 learns:", bare < 0.6)
print("with E5M2's range or with a scale, within 5% of fp32:")
print(*(abs(share - 1) < 0.05 for share in (wide, *scaled)))

# %% tags=["nbval-ignore-output", "hide-input"]
pd.Series(learned, name="learned, of fp32").map("{:.0%}".format).to_frame()

# %% [markdown]
# A scale a tensor is enough here, for gradients too. Those of large models reach further down: there NVIDIA's Transformer
# Engine takes E5M2 for them by default, and DeepSeek-V3 stays with E4M3 and has a scale for every 128 numbers of an
# activation and every 128 by 128 of a weight. MXFP8 on Blackwell has one, a power of two, for 32.
#
# What does a smaller block buy? An **outlier** shows it. One channel of each norm is multiplied by $k$, and the weights
# behind it are divided by $k$: in fp32 the same model. Then all other numbers are small beside the largest.


# %%
def with_outliers(k):
    model = copy.deepcopy(started)
    for block in model.blocks:
        for norm, layer in ((block.ln1, block.attention.qkv), (block.ln2, block.mlp.up)):
            with torch.no_grad():
                norm.weight[3] *= k
                norm.bias[3] *= k
                layer.weight[:, 3] /= k
    return model


int8, outliers = torch.int8, {}
for k in (1, 256, 65536):
    with torch.no_grad():
        outliers[f"k = {k}"] = {"fp32": with_outliers(k)(*exam).item()} | {
            name: in_8_bits(with_outliers(k), *how)(*exam).item()
            for name, how in {
                "int8, a scale a tensor": (int8, int8, None),
                "int8, a scale for 32": (int8, int8, 32),
                "E4M3, a scale a tensor": (E4M3, E4M3, None),
            }.items()
        }
plain, coarse, fine, eight = outliers["k = 65536"].values()
taught = begin - runs["fp32"][0][-1]
print("int8 with one scale loses more than 120 steps had taught:", coarse - plain > taught)
print("the other two less than a fifth of it:", max(fine, eight) - plain < taught / 5)

# %% tags=["nbval-ignore-output", "hide-input"]
pd.DataFrame(outliers).T.round(2)

# %% [markdown]
# In int8 one channel of 64 takes the steps of all others; with a scale for 32 numbers only its neighbours suffer. fp8
# hardly sees it: its exponent is a scale for each number, down to 18 powers of two below the largest. So int8 needs
# small blocks (chapter 10 sends gradients in it), and fp8 needs them where numbers reach further than that. The kernel
# that makes codes and scales of either kind in one pass is
# [refimpl/kernels/quantize.py](../refimpl/kernels/quantize.py).

# %% [markdown]
# ## 6. Break it: Inf on one rank only
#
# Rank 2 meets a bad batch and overflows; the others do not. The loop below checks its gradients, as it should, but it
# does so **before** the reduction, where each rank knows only its own.

# %% tags=["hide-input"]
predict(
    "Which ranks' weights are NaN after the step?",
    "all but rank 2",
    options=["rank 2's", "all but rank 2", "all"],
    why="Rank 2 sees its Inf and skips. The others see nothing before the all-reduce brings it.",
)

# %%
# %%ranks 4
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig

batches = Batches(corpus(), context=64, size=2)


def fresh():
    torch.manual_seed(0)
    return GPT(GPTConfig(context=64, width=64, layers=1, heads=2))


model = fresh()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    loss = model(*batches.batch(step, rank))
    if (rank, step) == (2, 1):
        loss = loss * float("inf")
    loss.backward()
    overflow = not all(p.grad.isfinite().all() for p in model.parameters())
    for p in model.parameters():
        group.all_reduce(p.grad, "mean")
    if not overflow:
        optimizer.step()
    optimizer.zero_grad()
    healthy = all(p.isfinite().all() for p in model.parameters())
    print(f"step {step}: I saw an overflow: {overflow}; my weights are finite: {healthy}")

# %% [markdown]
# The guilty rank skips and stays healthy for one step; the innocent ones add its Inf to their weights and turn to NaN.
# In the next step their NaN gradients reach rank 2 as well. Whoever looks for the rank with the NaN finds the wrong
# ones. (Had the loop skipped the all-reduce too, it would hang, as in chapter 2.)
#
# The remedy costs nothing: check **after** the reduction. Inf plus anything is Inf or NaN, so all ranks see it, decide
# alike and skip together. When each rank holds only a part, a **shard**, of the gradients (from ZeRO-1 on) it must be
# told: 8 bytes, in `Update._agree`.

# %%
# %%ranks 4
from refimpl import DDP
from refimpl.optim.loss_scale import DynamicLossScaler

model = fresh()
scaler = DynamicLossScaler(initial_scale=2.0**10, hysteresis=1)
ddp = DDP(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group, scaler=scaler)
for step in range(3):
    loss = model(*batches.batch(step, rank))
    if (rank, step) == (2, 1):
        loss = loss * float("inf")
    ddp.backward(loss)
    print(f"step {step}: stepped: {ddp.step()}; scale now {scaler.scale:.0f}")
print(
    "finite:",
    all(p.isfinite().all() for p in model.parameters()),
    "| skipped:",
    ddp.skipped_steps,
)

# %% [markdown]
# The other famous bug stood at the top of this chapter: no master weights. No error shows it. Count the weights that
# are bit for bit what they were a hundred steps ago; more than a few percent is a finding.

# %% [markdown]
# ## 7. Prove it
#
# Three steps of `refimpl.DDP` in bf16 on 2, 3 and 4 ranks, against one process that keeps masters by hand, adds the
# ranks' bf16 gradients in fp32, and rounds once.


# %%
def distributed():
    group, model = Group.world(), copy.deepcopy(started).bfloat16()
    ddp = DDP(model, AdamW(model.parameters(), lr=1e-4), group)
    for step in range(3):
        ddp.backward(model(*batches.batch(step, group.rank)))
        ddp.step()
    return ddp.full_state_dict()


def one_process(shares):
    model = copy.deepcopy(started).bfloat16()
    master = Master(model)
    for step in range(3):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
        for share in range(shares):
            model(*batches.batch(step, share)).backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad
                p.grad = None
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = (total / shares).bfloat16()
        master.step()
    return model.state_dict()


for n in (2, 3, 4):
    mine, theirs = run(distributed, ranks=n)[0], one_process(n)
    same = sum(torch.equal(mine[name], theirs[name]) for name in theirs)
    print(f"{n} ranks: {same} of {len(theirs)} tensors equal")

# %% [markdown]
# - **Exercises:** [exercises/03_precision_and_bytes](../exercises/03_precision_and_bytes): a sum in fp32, the overflow
#   that all ranks must see, unscaling with clipping, the dynamic scaler, master weights, and the formulas of memory and
#   traffic as code.
# - **Quiz:** `refimpl quiz --topic memory`, or `Quiz("memory")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/optim/test_loss_scale.py](../tests/optim/test_loss_scale.py),
#   [tests/zero/test_stages.py](../tests/zero/test_stages.py) (an Inf on one rank, in every strategy),
#   [tests/plan/test_transformer.py](../tests/plan/test_transformer.py) (activations, to the byte).
# - **Code:** [refimpl/zero/update.py](../refimpl/zero/update.py),
#   [refimpl/optim/loss_scale.py](../refimpl/optim/loss_scale.py),
#   [refimpl/plan/formulas.py](../refimpl/plan/formulas.py).
# - **DeepSpeed:** `deepspeed/runtime/fp16/loss_scaler.py`, `deepspeed/runtime/bf16_optimizer.py`.
# - **Papers:** Micikevicius et al. 2018, [arXiv:1710.03740](https://arxiv.org/abs/1710.03740), sections 3.1 (master
#   weights) and 3.2 (loss scaling); Rajbhandari et al. 2020, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054),
#   section 3.1 (the 16 bytes); Korthikanti et al. 2022, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198), section 4
#   (activations); Micikevicius et al. 2022, [arXiv:2209.05433](https://arxiv.org/abs/2209.05433) (fp8); DeepSeek-V3 2024,
#   [arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 3.3 (fp8 in blocks).
#
# Next: 12 of the 16 bytes are the optimizer's, and every rank keeps the same 12. [ZeRO-1](04_zero1.ipynb) deals them
# out.
