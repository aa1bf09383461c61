# %% [markdown]
# # 7 · Activations: keep them, or compute them again
#
# ZeRO divides what a model weighs by the number of ranks. What it does not divide is what a *batch* weighs: the tensors
# that forward leaves behind for backward, the **activations**. This chapter counts them, drops most of them, computes
# them a second time, and finds the cheapest way to do so within a given number of bytes.

# %% [markdown]
# ## 1. The pain: a weight that grows with the text
#
# A model of 7 billion parameters, width 4096 and 32 blocks, in bf16 on 64 ranks. Its state, by ZeRO-3, beside what the
# blocks keep for backward of one sequence, in GB:

# %%
# %load_ext refimpl.notebook

# %%
import pandas as pd

from refimpl.model.gpt import GPTConfig
from refimpl.plan.formulas import Layout, memory_bytes
from refimpl.plan.transformer import activation_bytes

state = sum(memory_bytes("zero3", 64, 2, Layout(7_000_000_000, padding=0, buckets=0)).values())
rows = {}
for tokens in (2048, 8192, 32768):
    config = GPTConfig(vocab=32_000, context=tokens, width=4096, layers=32, heads=32)
    rows[f"{tokens:,} tokens"] = [
        f"{state / 1e9:.1f}",
        f"{32 * activation_bytes(config, batch=1) / 1e9:.1f}",
    ]
pd.DataFrame.from_dict(rows, orient="index", columns=["model state, ZeRO-3", "activations"])

# %% [markdown]
# More ranks make the first column smaller, and leave the second as it is. Where does it come from? A linear layer needs
# its input to compute the gradient of its weight, GELU needs its input to know its slope, and so on. autograd keeps
# those inputs from forward to backward. How much is that for a block of the GPT that we train? Count in units of one
# tensor of `B T w` elements: a batch of `B` texts, `T` tokens each, `w` numbers a token.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "A pre-norm block: two norms, attention with fused scores, an MLP four times as wide with GELU. "
    "How many tensors of B T w elements does autograd keep of it?",
    16,
    unit="tensors",
    why="8 around attention (norm in, qkv in, q, k, v, attention out, norm in, MLP in), 4 before GELU and 4 after it.",
)

# %% [markdown]
# autograd tells whoever asks: a pair of **saved-tensor hooks** sees each tensor as it is kept.

# %%
import torch
from torch.autograd.graph import saved_tensors_hooks

from refimpl.model.gpt import Block

torch.set_num_threads(1)
B, T, w = 2, 16, 64
config = GPTConfig(vocab=64, context=T, width=w, layers=1, heads=2)
torch.manual_seed(0)
block, x = Block(config), torch.randn(B, T, w, requires_grad=True)
saved = {}
weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
with saved_tensors_hooks(
    lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
):
    y = block(x)
kept = {
    address: t.untyped_storage().nbytes()
    for address, t in saved.items()
    if address not in weights
}
units = [n / (B * T * w * 4) for n in kept.values()]
pd.DataFrame(
    {
        "formula": ["16 B T w elements", activation_bytes(config, B, itemsize=4)],
        "counted": [
            f"{sum(u for u in units if u >= 1):.0f} B T w elements",
            sum(kept.values()),
        ],
    },
    index=["large tensors", "bytes in fp32"],
)

# %% [markdown]
# The rest are statistics: mean and deviation of each norm, and one number a token and head of the fused attention.
# *Fused* means that one kernel computes the scores, their softmax and the sum over the values, and never writes the
# scores to memory (FlashAttention; chapter 14 builds one). An attention that is not fused also keeps $T$ scores a token
# and head, which soon are more than all the rest. Korthikanti et al. (2022) count $34\,B T w$ *bytes* in 16 bits for a
# block with dropout, scores aside, and ours without is 32: their two more are dropout's masks.

# %% [markdown]
# ## 2. The idea: keep the input, run it twice
#
# A block is a function of its input. Keep that one tensor, drop the 15 others, and when backward arrives, run the block
# once more.
#
# ```mermaid
# flowchart LR
#   X["x, kept"] --> F["forward, nothing kept"] --> Y["y"]
#   X -.->|"backward arrives"| A["forward again, all kept"]
#   A --> G["backward of this block"]
#   Y --> L["loss"] -->|"gradient of y"| G -->|"gradient of x"| E["the block before"]
# ```
#
# With $L$ blocks the peak falls, and the work rises by one forward. Backward is about two forwards, so it is one more
# in three:
#
# $$\underbrace{16\,L}_{\text{keep all}} \;\longrightarrow\; \underbrace{L + 15}_{\text{inputs, and one block}}
# \quad\text{in units of } B\,T\,w, \qquad \text{time} \times \tfrac43.$$
#
# This is **activation checkpointing**, or recomputation (Chen et al. 2016; the idea is older than deep learning:
# Griewank 1992). The name has nothing to do with files.

# %% [markdown]
# ## 3. Build it
#
# An `autograd.Function` is a forward and a backward written by hand. Inside its forward autograd records nothing. That
# is all we need:


# %%
class Twice(torch.autograd.Function):
    """One tensor in, one out."""

    @staticmethod
    def forward(ctx, fn, x):
        ctx.fn = fn
        ctx.save_for_backward(x)
        return fn(x)  # nothing is recorded here

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x)  # now it is
        y.backward(grad)  # also adds to the gradients of fn's parameters
        return None, x.grad


def gradients(call):
    block.zero_grad()
    x.grad = None
    call(block, x).square().sum().backward()
    return [x.grad.clone(), *(p.grad.clone() for p in block.parameters())]


plain = gradients(lambda fn, x: fn(x))
print("equal bits:", all(map(torch.equal, gradients(Twice.apply), plain)))

# %% [markdown]
# Count it. The meter of the earlier chapters calls live tensors that forward made *activations*:

# %% tags=["hide-input"]
predict(
    "8 blocks, each run by `Twice`. How many tensors of B T w elements are alive between forward and backward, "
    "the last output and the first input among them?",
    9,
    unit="tensors",
    why="The input of each block, and the output of the last.",
)

# %%
from torch import nn

from refimpl.measure.memory import MemoryMeter

torch.manual_seed(0)
blocks = nn.ModuleList(Block(config) for _ in range(8))


def alive(call):
    """Tensors of B T w elements between forward and backward."""
    meter = MemoryMeter(lambda: {"parameters": blocks.parameters()})
    with meter:
        y = torch.randn(B, T, w).requires_grad_()
        for block in blocks:
            y = call(block, y)
        return meter.now()["activations"] // (B * T * w * 4)


print(alive(lambda fn, x: fn(x)), "kept by a plain run,", alive(Twice.apply), "by Twice")

# %% [markdown]
# `Twice` is right for a block without dropout. Your own, in the exercise, takes any arguments, returns several tensors,
# and draws the same random numbers twice. The first decision is another one: where to cut. A **stretch** of $k$ blocks
# can be checkpointed as one. Then there are $L/k$ inputs, but while a stretch runs again, all $k$ blocks of it are kept.
#
# **Your turn.** Write the body and run the cell; `%hint 07_activations stretches` helps.


# %%
# %%task 07_activations stretches
def stretches(layers: int, saved: float) -> list[tuple[int, int]]:
    """Cut a chain of equal layers into stretches [first, stop) of k layers, each checkpointed
    as a whole.

    The last may be shorter. Choose the k with the least peak, and the smallest of those.

    The peak, in units of a layer's input: one input for each stretch, and while a stretch of k
    runs again, for each of its layers what the layer keeps beside its input (`saved`), and for
    all but the first the input as well.
    Examples: stretches(9, 0) -> [(0, 3), (3, 6), (6, 9)], the peak is 3 + 2; stretches(4, 15)
    -> every layer by itself.
    """
    raise NotImplementedError("stretches")


# %% [markdown]
# The paper's answer is $k = \sqrt L$, and is quoted everywhere. It holds for layers that keep one tensor each.

# %% tags=["hide-input"]
predict(
    "A transformer of 16 blocks, which keep 15 tensors beside their input. Which stretch has the least peak?",
    "1 block",
    options=["1 block", "4 blocks, the square root", "16 blocks"],
    why="L/k + k (1 + 15) - 1: the second term is 16 times as steep. The best k is sqrt(L / 16).",
)

# %%
from refimpl.activation.budget import best, every, forwards, keep, peak, sqrt
from refimpl.activation.chain import count, measure

measured = measure(list(blocks), x)
rows = {}
for name, plan in {
    "keep all": keep(8),
    "k = 1": every(1, 8),
    "k = 2": every(2, 8),
    "sqrt(8), up": sqrt(8),
}.items():
    rows[name] = [peak(plan, measured), count(plan, list(blocks), x)]
pd.DataFrame.from_dict(rows, orient="index", columns=["predicted bytes", "counted bytes"])

# %% [markdown]
# (`sqrt(8), up` is $k = 3$.) Every number is equal. `count` looks whenever a block has just run; within a block its own
# temporaries come on top.

# %% [markdown]
# ## 4. Read it
#
# The real one is not built on `autograd.Function`. `Twice` needs an input that requires a gradient, misses tensors inside
# lists, cannot serve `torch.autograd.grad`, and runs each function to its end. refimpl's (as torch's newer one) lets
# autograd record the graph once, in forward, and replaces only what it *keeps*: each saved tensor becomes a `Slot` that
# holds nothing.

# %%
from refimpl.activation.checkpoint import Again as SecondRun
from refimpl.activation.checkpoint import Frame
from refimpl.notebook import show

show.source(Frame.pack, Frame.unpack, SecondRun.pack)

# %% [markdown]
# The first slot that backward asks for its tensor runs the function again, with hooks that fill all slots. When the
# last one that is wanted is full, `Enough` ends the run: what a function computes after its last saved tensor is never
# computed twice. A slot belongs to autograd's graph, so it goes when the graph goes, and nesting needs no code: inside
# another checkpoint the arguments become slots themselves.

# %% tags=["hide-input"]
predict(
    "f(x) = x.sin().cos() + 1 is checkpointed. Which operations run a second time?",
    "sin",
    options=["sin", "sin and cos", "sin, cos and +"],
    why="sin keeps x, cos keeps sin(x). When cos hands that to autograd, before it computes, both slots are full.",
)

# %%
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.activation.checkpoint import Checkpoint, checkpoint


class Log(TorchDispatchMode):
    """Names of sin, cos and add, as they are computed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) in ("sin", "cos", "add"):
            print(name, end=" ")
        return func(*args, **(kwargs or {}))


small = torch.ones(3, requires_grad=True)
with Log():
    out = checkpoint(lambda x: x.sin().cos() + 1, small).sum()
    print("| backward:", end=" ")
    torch.autograd.grad(out, small)
print()

# %% [markdown]
# (After the bar: the second run's `sin`; then the two slopes that backward itself computes, a `sin` for cos and a `cos`
# for sin.)

# %% [markdown]
# ## 5. Measure it: the best plan for a budget
#
# Keeping all and keeping nothing are the ends of a line. With room for some blocks, which ones? And a stretch that runs
# again may itself keep some of its blocks and not others. **Rotor** (Beaumont et al. 2019) finds the best nested plan
# by dynamic programming: $T(i, t, m)$ is the least time to run blocks $i$ to $t - 1$ in $m$ bytes,
#
# $$T(i,t,m) = \min\begin{cases} f_i + T(i{+}1,\, t,\, m - s_i - a_{i+1}) & \text{keep block } i\\
# \min_j\; f_i + \dots + f_{j-1} + T(j,\, t,\, m - a_j) + T(i,\, j,\, m) & \text{run } i \dots j{-}1 \text{ again}\end{cases}$$
#
# with $f$ the time of a forward, $a$ the bytes of an input, $s$ those kept beside it; $j$ lies between $i$ and $t$, and
# nothing is taken for $a_t$, which is no input of these blocks. (Backward's own time is the same in every plan, and is
# left out.) `least_time` in the exercises is this formula. On 24 equal blocks like ours, which keep 15.1 inputs beside
# their own:

# %%
from refimpl.activation.budget import Block as Measured
from refimpl.cli.plan import words

unit = x.nbytes
chain = [Measured(unit, unit, measured[0].saved, forward=1.0, backward=2.0)] * 24
rows = {}
for share in (1.0, 0.5, 0.25, 0.12, 0.08):
    plan = best(chain, int(share * peak(keep(24), chain)))
    rows[f"{share:.0%}"] = [
        f"{peak(plan, chain) / unit:.0f}",
        f"{forwards(plan, chain) / 24:.2f}",
        words(plan)[:60],
    ]
pd.DataFrame.from_dict(rows, orient="index", columns=["peak, inputs", "forwards", "plan"])

# %% [markdown]
# Read a plan as a list: numbers are blocks that are kept, `again(...)` runs by the plan inside. The smaller the budget,
# the deeper it nests. Stretches end where every block is run again, at 2 forwards; nested plans go on below.

# %% tags=["nbval-ignore-output", "hide-input"]
import matplotlib.pyplot as plt

from refimpl.notebook import show

full = peak(keep(24), chain)
points = []
for share in (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.12, 0.1, 0.09, 0.08, 0.075):
    plan = best(chain, int(share * full))
    points.append((peak(plan, chain) / unit, (forwards(plan, chain) + 48) / 72))
figure, axis = show.figure(3)
axis.plot(
    *zip(*points, strict=True), "-o", ms=4, color="#2a6f97", label="best plan for a budget"
)
for k in (1, 4, 8):
    at = peak(every(k, 24), chain) / unit
    axis.plot([at], [4 / 3], "s", color="#c1666b")
    axis.annotate(str(k), (at, 4 / 3), textcoords="offset points", xytext=(0, 6))
axis.set(
    xlabel="peak, in inputs of a block",
    ylabel="time, x keeping all",
    title="24 blocks, 15 kept beside each input",
)
axis.plot([], [], "s", color="#c1666b", label="every k-th block: k")
axis.legend(frameon=False)
plt.show()
# %% [markdown]
# Squares are stretches of $k$ blocks: all cost the same time, and only $k = 1$ comes near the line. For your own shape, on
# your own machine: `refimpl plan activations --budget 2GB --layers 24 --width 1024`. PyTorch users will know
# `torch.utils.checkpoint` with `use_reentrant=False`; in Megatron-LM, with `--recompute-granularity full` and
# `--recompute-method uniform`, $k$ is `--recompute-num-layers`.
#
# **Not all of a block is equally dear.** Products of matrices are nearly all of the operations; norms, GELU and adds
# are few, and make 7 of the 16 tensors. A *selective* checkpoint keeps the results of products and computes the rest
# again (torch's `create_selective_checkpoint_contexts`). They are 11 a block with the input: two products end in a
# residual add, which needs none of its inputs, so a plain run drops their results. (Megatron's `selective` chooses
# otherwise: by default it runs only the core of attention again, the scores, which a fused kernel never keeps.
# `torch.compile` chooses by itself what to keep, and solves a knapsack for it when
# `torch._functorch.config.activation_memory_budget` is less than 1.)

# %%
from refimpl.activation.policy import matmuls

rows = {}
for name, how in {
    "checkpoint": Checkpoint(),
    "matmuls kept": Checkpoint(policy=matmuls()),
}.items():
    kept = count(every(1, 8), list(blocks), x, how) / x.nbytes
    rows[name] = [f"{alive(how)}", f"{kept:.0f}"]
rows["plain run"] = [
    f"{alive(lambda fn, x: fn(x))}",
    f"{count(keep(8), list(blocks), x) / x.nbytes:.0f}",
]
pd.DataFrame.from_dict(rows, orient="index", columns=["B T w, after forward", "at the peak"])

# %% [markdown]
# **With ZeRO-3** a second run needs the weights again. They are being gathered for backward anyway: the run finds them
# there, or gathers them for backward, and nothing is sent twice. Counted on two ranks, in the third step, and the
# weights compared after it:

# %% tags=["hide-input"]
predict(
    "ZeRO-3 with every block checkpointed. All-gathers of weights in a step, beside a run without checkpoints?",
    "as many",
    options=["as many", "half as many again", "twice as many"],
    why="Forward 1, and backward 1, in which the second run uses what backward needs.",
)

# %%
# %%ranks 2
from refimpl.activation.budget import every, keep
from refimpl.activation.chain import Chain
from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.zero.config import ZeroConfig
from refimpl.zero.zero3 import Zero3

shape = GPTConfig(context=32, width=64, layers=4, heads=2)
batches = Batches(corpus(), context=32, size=2)


def third_step(plan):
    """All-gathers, activations between forward and backward, the weights."""
    torch.manual_seed(0)
    model = GPT(shape)
    model.blocks = Chain(model.blocks, plan)  # the same modules, under the same names
    stage = Zero3(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        group,
        ZeroConfig(param_persistence_threshold=0),
    )
    for step in range(3):
        group.ledger.reset()
        with MemoryMeter(stage.tensors) as meter:
            loss = model(*batches.batch(step, micro=rank))
            kept = meter.now()["activations"]
        stage.backward(loss)
        stage.step()
    return group.ledger.calls("tag")["parameters"], kept, stage.model.state_dict()


plain, again = third_step(keep(4)), third_step(every(1, 4))
print(f"all-gathers {plain[0]} and {again[0]}, activations {plain[1]:,} and {again[1]:,} bytes")
print("equal weights:", all(torch.equal(plain[2][name], again[2][name]) for name in plain[2]))

# %% [markdown]
# **Shared, or sent away.** What is left is one input a block. Tensor-parallel neighbours (ranks that share the work of
# each layer for the same texts, chapter 11) hold the same one, so each can keep $1/N$ and gather it back (ZeRO's paper
# calls it $P_a$); or it waits in the host's memory (`torch.autograd.graph.save_on_cpu` sends all that is saved there).
# In DeepSpeed's JSON these are `partition_activations` and `cpu_checkpointing`, in the section
# `activation_checkpointing`. Three ranks, the same input on each, two checkpoints:

# %%
# %%ranks 3
from refimpl.activation.checkpoint import Checkpoint
from refimpl.activation.home import Partitioned, gathered_bytes, kept_bytes

home = Partitioned(group)
torch.manual_seed(0)
linear, x = torch.nn.Linear(7, 7), torch.randn(5, 7)
share = home.put(x)  # the first also compares the ranks' inputs, by two sums in fp64
group.ledger.reset()
how = Checkpoint(home)
how(linear, how(linear, x)).sum().backward()
print(
    f"kept of an input: {share.mine.nbytes} bytes of {x.nbytes}, by formula {kept_bytes(x, 3)}"
)
print(
    f"sent: {group.ledger.sent_bytes('tag')['activations']}, by formula {2 * gathered_bytes(x, 3)}"
)

# %% [markdown]
# Data-parallel ranks hold *other* samples. Asked to share those, `Partitioned` refuses.

# %% [markdown]
# ## 6. Break it
#
# **Holes.** A checkpoint's input lives long, and is allocated between tensors that live for a moment. When those go, the
# memory around the inputs is free, and in pieces. A job then dies of "out of memory" with gigabytes free. The cure is a
# block of memory of one's own, in which pieces move together, an **arena**:

# %% tags=["nbval-ignore-output"]
from refimpl.activation.arena import Arena

arena = Arena(24 * 1024)
torch.manual_seed(0)
long, short = [], []
for _ in range(8):
    long.append(arena.empty((256,), torch.float32))  # the checkpoint: 1 KiB
    short.append(arena.empty((512,), torch.float32))  # what the block needs meanwhile: 2 KiB
short.clear()
view = long[5][10:]  # somebody looks at a part of the sixth


def picture(axis, title):
    for piece in arena.pieces:
        pinned = piece.tensor() is long[5]
        axis.barh(
            0,
            piece.size,
            left=piece.offset,
            color="#c1666b" if pinned else "#2a6f97",
            edgecolor="white",
        )
    axis.set(
        xlim=(0, arena.size),
        yticks=[],
        xticks=[],
        title=f"{title}: {arena.free_bytes:,} bytes free, largest gap {arena.largest_gap:,}",
    )
    axis.title.set_fontsize(9)
    axis.spines[:].set_visible(False)


figure, axes = show.figure(1.8, rows=2)
picture(axes[0], "before")
arena.defragment()
picture(axes[1], "after (red is viewed, and stays)")
plt.show()
# %%
values = [torch.full((256,), float(i)) for i in range(8)]
for tensor, value in zip(long, values, strict=True):
    tensor.copy_(value)
del view
arena.defragment()  # now the sixth may move too
print(
    "one gap:",
    arena.gaps() == [(8 * 1024, 16 * 1024)],
    "| no value changed:",
    all(map(torch.equal, long, values)),
)

# %% [markdown]
# DeepSpeed's `contiguous_memory_optimization` is such an arena. On a GPU you rarely need one today: with
# `PYTORCH_ALLOC_CONF=expandable_segments:True` (`PYTORCH_CUDA_ALLOC_CONF` in older versions) torch's allocator reserves
# addresses, not memory, and maps free pages to wherever a large tensor is wanted. That closes every hole of whole pages
# (20 MB for large tensors, 2 MB for small ones) without moving anything. Use an arena where that is not supported, or
# where a fixed number of bytes must be enough, to the byte.
#
# **The other dropout.** Here is the famous bug. `Twice` around a block *with* dropout:

# %% tags=["hide-input"]
predict(
    "`Twice` runs a block with dropout. What is wrong, and how does it show?",
    "the gradients, silently",
    options=["nothing", "an error in backward", "the gradients, silently", "the loss, visibly"],
    why="Backward's run draws another mask: gradients of a network whose loss was never computed. The loss still falls.",
)

# %%
dropping = nn.Sequential(nn.Linear(w, w), nn.Dropout(0.5), nn.Linear(w, 1))


def slope(call):
    """The gradient of the first weight."""
    torch.manual_seed(1)
    dropping.zero_grad()
    call(dropping, torch.ones(1, w, requires_grad=True)).sum().backward()
    return dropping[0].weight.grad.clone()


true = slope(lambda fn, x: fn(x))
for name, call in {"Twice": Twice.apply, "checkpoint": checkpoint}.items():
    found = slope(call)
    print(
        f"{name:10} equal bits: {torch.equal(found, true)!s:5}  masks agree on {((found != 0) == (true != 0)).double().mean():.0%}"
    )

# %% [markdown]
# No error, no NaN, and a loss that goes down more slowly, for weeks. The remedy is five lines: keep the generator's
# state in forward, set it back for the second run, and put it afterwards where it stood. What finds it is a comparison
# of *gradients* with a run that keeps all, dropout on, to the last bit. On a GPU its generator counts as well, and under
# Megatron the named generators of its tensor-parallel regions
# ([`get_cuda_rng_tracker`](../refimpl/deepspeed/runtime/activation_checkpointing/rng.py)).
#
# Its relatives: batch norm counts its running statistics twice, an autocast region that was left before backward
# (`checkpoint` enters it again), a module put into `eval()` in between.

# %% [markdown]
# ## 7. Prove it
#
# - **Exercises:** [exercises/07_activations](../exercises/07_activations/exercise.py): `pytest exercises/07_activations`
# - **Quiz:** `refimpl quiz --topic memory`, or `Quiz("memory")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/activation](../tests/activation/test_checkpoint.py): gradients of 17 habits of
#   writing, the best plan against all plans there are, an arena in which anything may happen.
# - **Code:** [checkpoint.py](../refimpl/activation/checkpoint.py), [policy.py](../refimpl/activation/policy.py),
#   [budget.py](../refimpl/activation/budget.py), [home.py](../refimpl/activation/home.py),
#   [arena.py](../refimpl/activation/arena.py).
# - **DeepSpeed:**
#   [deepspeed/runtime/activation_checkpointing/checkpointing.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/activation_checkpointing/checkpointing.py).
# - **Papers:** Chen et al. 2016, [arXiv:1604.06174](https://arxiv.org/abs/1604.06174) (the square root). Beaumont et al.
#   2019, [arXiv:1911.13214](https://arxiv.org/abs/1911.13214) (the best plan). Korthikanti et al. 2022,
#   [arXiv:2205.05198](https://arxiv.org/abs/2205.05198) (bytes of a block, selective). Rajbhandari et al. 2020,
#   [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), section 6.1 (partitioned, and on the host).
