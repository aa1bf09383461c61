# %% [markdown]
# # 6 · ZeRO-3: weights that come when they are needed
#
# After ZeRO-2 each rank holds its part of the gradients and of the optimizer, and still all of the weights. This
# chapter cuts the weights too. Between two uses of a layer a rank keeps $1/N$ of it. At the end a model trains inside a
# memory limit that the operating system enforces, and in which every other stage runs out of memory. You need chapters
# 04 and 05.

# %% [markdown]
# ## 1. The pain: a floor that no number of ranks can lower
#
# What a rank keeps for a model of 7 billion parameters in bf16 with AdamW, by formula, in GB:

# %%
# %load_ext refimpl.notebook

# %% tags=["hide-input"]
import pandas as pd

from refimpl.plan.formulas import STRATEGIES, Layout, memory_bytes

seven = Layout(numel=7_000_000_000, padding=0, buckets=0)
pd.DataFrame(
    {
        f"{n} ranks": [
            f"{sum(memory_bytes(name, n, 2, seven).values()) / 1e9:.1f}" for name in STRATEGIES
        ]
        for n in (1, 8, 64, 1000)
    },
    index=STRATEGIES,
)

# %% [markdown]
# A thousand ranks with ZeRO-2 keep 14 GB each, the weights. Only the last row goes on falling. And how much of the
# weights does a rank use at one moment? It computes one layer after the other:

# %%
import torch

from refimpl.model.gpt import GPT, GPTConfig

with torch.device("meta"):  # shapes without memory
    model = GPT(GPTConfig(vocab=50_000, context=2048, width=4096, layers=32, heads=32))
block = sum(p.numel() for p in model.blocks[0].parameters())
f"one block of {len(model.blocks)} holds {block / model.config.parameters:.1%} of the weights"

# %% [markdown]
# ## 2. The idea: gather, compute, forget
#
# Each layer's weights are cut in $N$ shards. Just before the layer computes, an all-gather makes them whole. Right
# after, their memory is given back. Backward needs them again and gathers again. The gradient leaves as in ZeRO-2.
#
# ```mermaid
# flowchart LR
#   S["my shard, 1/N"] -->|all-gather| W["whole layer"]
#   W --> F["forward"] -->|free| S2["my shard"]
#   S2 -->|all-gather| W2["whole layer"]
#   W2 --> B["backward"] -->|free| S3["my shard"]
#   B -->|reduce-scatter| G["my part of the gradient"] -->|AdamW| S3
# ```
#
# Memory in bf16: everything over $N$, plus what is gathered at the moment. Traffic: one more all-gather than before.
#
# $$\frac{2 + 2 + 12}{N}\,\Psi \text{ bytes}, \qquad
# \underbrace{\Psi}_{\text{forward}} + \underbrace{\Psi}_{\text{backward}} + \underbrace{\Psi}_{\text{gradients}}
# = 3\,\Psi b\,\tfrac{N-1}{N} \text{ bytes sent.}$$
#
# Three in place of two: half as much again as DDP.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "bf16 and AdamW on 64 ranks. How many bytes a parameter does ZeRO-3 keep?",
    16 / 64,
    unit="bytes",
    why="16/N",
)

# %% [markdown]
# ## 3. Build it
#
# **The bare form.** A gather is an operation like any other: it takes a shard $[S]$ and returns the whole $[P]$. What
# is its gradient? Every rank has a gradient of the whole; the shard's is my part of their mean. So *the backward of an
# all-gather is a reduce-scatter*, and autograd does the rest. This is all of ZeRO-3 that mathematics asks for:


# %%
# %%ranks 4
from torch.utils.checkpoint import checkpoint

from refimpl.comm.group import Group
from refimpl.measure.memory import MemoryMeter

tcp = Group.world(
    transport="gloo"
)  # shared memory would keep copies, which the meter would count


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        whole = torch.empty(shard.numel() * world_size)
        tcp.all_gather(whole, shard.detach(), tag="parameters")
        return whole

    @staticmethod
    def backward(ctx, grad):
        mine = torch.empty(grad.numel() // world_size)
        tcp.reduce_scatter(mine, grad, "mean", tag="gradients")
        return mine


def layer(x, shard):
    return torch.tanh(x @ Gather.apply(shard).view(256, 256))


torch.manual_seed(0)
weights = [torch.randn(256, 256) / 16 for _ in range(8)]
x = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))
plain = [w.clone().requires_grad_() for w in weights]
y = x
for w in plain:
    y = torch.tanh(y @ w)
y.square().mean().backward()
for w in plain:
    group.all_reduce(w.grad, "mean")

once = 8 * 256 * 256 * 4
for again in (False, True):
    shards = [w.view(world_size, -1)[rank].clone().requires_grad_() for w in weights]
    tcp.ledger.reset()
    y = x
    with MemoryMeter(lambda: {"shards": shards}) as meter:
        for shard in shards:
            y = checkpoint(layer, y, shard, use_reentrant=False) if again else layer(y, shard)
        kept = sum(meter.sample().values()) - meter.now()["shards"]
    y.square().mean().backward()
    right = all(
        torch.equal(s.grad, w.grad.view(world_size, -1)[rank])
        for s, w in zip(shards, plain, strict=True)
    )
    sent = {tag: n / (once * 3 / 4) for tag, n in tcp.ledger.sent_bytes("tag").items()}
    share = "most" if kept > once / 2 else "little"
    print(
        f"gathered {1 + again} x, right: {right}, kept after forward: {share} of Ψb beside the shards;",
        sent,
    )

# %% [markdown]
# Right at once, and no memory saved: autograd keeps the gathered weights until backward. (7 of the 8. The first is not
# needed, because nobody asks for the gradient of its input.) `checkpoint` drops what a layer has saved and runs its
# forward a second time when backward comes there, gather included: now little is kept, and $\Psi$ more is sent.
# SimpleFSDP (Zhang et al. 2024, [arXiv:2411.00284](https://arxiv.org/abs/2411.00284); torchtitan's `simple_fsdp.py`) is
# built like this, and repeats the gather alone, not the product.
#
# DeepSpeed, FSDP and refimpl gather again, but compute nothing twice. FSDP and refimpl leave the tensors that autograd
# has saved where they are and take away the memory behind them.
#
# **Giving memory back.** A tensor is a view of a *storage*. One can take the memory from a storage and leave all its
# tensors in place. They keep their shapes, and are right again when the memory comes back and is filled:

# %% tags=["hide-input"]
predict(
    "What happens to a layer's weights in a step?",
    ["gather", "forward", "free", "gather again", "backward", "reduce-scatter"],
    order=True,
)

# %%
x = torch.arange(6.0)
view = x.view(2, 3).t()
x.untyped_storage().resize_(0)
print(x.untyped_storage().nbytes(), "bytes,", tuple(x.shape), tuple(view.shape))

x.untyped_storage().resize_(6 * 4)
x.copy_(torch.arange(10.0, 16.0))
view

# %% [markdown]
# (Between the two, reading `x` would read address zero. Whoever does this must be sure that nobody looks.)
#
# Why not simply let the parameter point to an empty tensor, `p.data = torch.empty(0)`? Because autograd has a pointer
# of its own. Forward saves what backward will need, here the transposed weight, a view of the same storage:

# %%
w = torch.nn.Parameter(torch.randn(1000, 1000))
y = torch.randn(1, 1000, requires_grad=True) @ w.t()
storage, saved = w.untyped_storage(), y.grad_fn._saved_mat2  # what backward will read

w.data = torch.empty(0)
print(f"after p.data = empty:   {saved.untyped_storage().nbytes():9,} bytes are alive")
storage.resize_(0)
print(f"after storage.resize_:  {saved.untyped_storage().nbytes():9,} bytes are alive")

# %% [markdown]
# With an empty `.data` the parameter looks freed, and every byte is still there until backward. Freeing the storage
# frees it for all views at once, and refilling it serves them all, including the one that autograd saved. (DeepSpeed
# does set `.data`. So it brings a linear layer of its own, which saves the parameter and not a view of it.)
#
# **A part of a model**, called a **unit**, is a flat buffer, of which the parameters are views, that has memory only
# while it is needed, and a shard that stays.
#
# **Your turn.** Write the class and run the cell: it is saved in your exercise's file and graded on real ranks in a
# second or two. `%hint 06_zero3 ShardedParams` helps.


# %%
# %%task 06_zero3 ShardedParams
class ShardedParams:
    """Parameters that are whole between gather() and free(), and a shard for the rest of the
    time.

    unit = ShardedParams(module.parameters(), group)    # freed; this rank keeps unit.mine [S]
    unit.gather()                                       # the parameters can be used
    unit.free()                                         # they have no memory; shapes stay
    """

    def __init__(self, params: Sequence[nn.Parameter], group: Group) -> None:
        """Take rank 0's values: make self.full [P], of which the parameters are views, and
        self.mine [S]; free full.

        self.mine has memory of its own. `params` have one dtype, and need not be contiguous.
        """
        raise NotImplementedError("ShardedParams.__init__")

    def gather(self) -> None:
        """Everyone's shards -> self.full, at once into its memory: no other buffer is as large.

        Nothing, and no traffic, if it is whole already.
        """
        raise NotImplementedError("ShardedParams.gather")

    def free(self) -> None:
        """Give the memory of self.full back."""
        raise NotImplementedError("ShardedParams.free")


# %% [markdown]
# **And when?** Four hooks say it: before a module's forward, after it, before its backward (the moment when the gradient
# of its output is known), and when a gradient is complete. `%hint 06_zero3 Zero3` helps.


# %%
# %%task 06_zero3 Zero3
class Zero3:
    """Trains a model of which no rank ever holds more than a module or two.

        zero = Zero3(model, group)
        model(batch).mean().backward()
        zero.grads[module]            # [S], the mean over ranks, laid out as
                                      # zero.units[module].mine; padding zero

    Each module with parameters of its own (module.parameters(recurse=False)) is a unit. It is
    gathered before the module's forward and freed after it; gathered again before its backward,
    and freed when all its gradients are complete. They are reduce-scattered at once, and
    further backwards add up, in the gradients' dtype. Every parameter is trained, none is
    shared, every module returns one tensor. Traffic of a forward and backward: 2 all-gathers
    and 1 reduce-scatter a unit.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        """Make self.units, {module: ShardedParams}, and self.grads = {}; put the hooks below on
        modules and parameters.

        module.register_forward_pre_hook(fn) calls fn(module, args);
        module.register_forward_hook(fn) calls fn(module, args, output);
        p.register_post_accumulate_grad_hook(fn) calls fn(p) when p.grad is complete.
        """
        raise NotImplementedError("Zero3.__init__")

    def before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The module is about to compute."""
        raise NotImplementedError("Zero3.before_forward")

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """It has: free it. And ask to be called before its backward: output.register_hook(fn)
        calls fn(gradient).
        """
        raise NotImplementedError("Zero3.after_forward")

    def on_gradient(self, module: nn.Module, p: nn.Parameter) -> None:
        """One gradient is complete. If it is the module's last: reduce-scatter them, free
        gradients and parameters.
        """
        raise NotImplementedError("Zero3.on_gradient")


# %% [markdown]
# Train a stack of four transformer blocks with it, beside the same stack under a plain all-reduce. (`yours` brings your
# class, once it has passed, and until then one that does the same.)


# %% tags=["hide-input"]
predict(
    "How much does a step send, in units of the parameters' bytes times (N-1)/N? DDP sends 2.",
    3,
    why="Two gathers, one reduction.",
)

# %%
# %%ranks 4
from refimpl.model.gpt import Block, GPTConfig
from refimpl.notebook.yours import yours

Zero3 = yours("06_zero3", "Zero3")
config = GPTConfig(width=64, heads=2, layers=4)


def stack():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(config) for _ in range(4)))


def data(step):
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(100 * step + rank))


plain, sharded = stack(), stack()
psi = sum(p.numel() for p in plain.parameters())
zero = Zero3(sharded, group)
adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
adamw_of_shards = torch.optim.AdamW([unit.mine for unit in zero.units.values()], lr=1e-2)
group.ledger.reset()
for step in range(3):
    sharded(data(step)).square().mean().backward()
    for module, unit in zero.units.items():
        unit.mine.grad = zero.grads.pop(module)
    adamw_of_shards.step()
sent = group.ledger.sent_bytes()

for step in range(3):
    plain(data(step)).square().mean().backward()
    for p in plain.parameters():
        group.all_reduce(p.grad, "mean")
    adamw.step()
    adamw.zero_grad()

between_steps = sum(unit.full.untyped_storage().nbytes() for unit in zero.units.values())
for unit in zero.units.values():
    unit.gather()
equal = all(
    torch.equal(a, b) for a, b in zip(plain.parameters(), sharded.parameters(), strict=True)
)
print(f"equal bits after 3 steps: {equal}; whole weights between steps: {between_steps} bytes")
print({op: f"{n / (3 * psi * 4 * 3 / 4):.2f} times Ψb(N-1)/N a step" for op, n in sent.items()})

# %% [markdown]
# Two gathers and one reduction a step, $3\Psi$, and the bits of data parallel training.

# %% [markdown]
# The last task is on paper: how much is kept, and how much is whole at once? The real stage gathers units ahead, while
# the one before them computes. That is the **prefetch**; `budget` limits how much of it may be on its way, and 0 means
# none. `%hint 06_zero3 zero3_bytes` helps. Then read on.


# %%
# %%task 06_zero3 zero3_bytes
def zero3_bytes(units: Sequence[int], ranks: int, itemsize: int, budget: int) -> dict[str, int]:
    """Bytes on a rank with AdamW: "kept", and "gathered", the most that is whole at once in an
    iteration.

    units: elements of each, multiples of `ranks`, in the order of forward; backward uses them
    in the opposite order.
    kept: the shards of parameters and gradients (`itemsize` bytes an element), AdamW's two fp32
    numbers, and fp32 masters below fp32. gathered: at each use the unit itself is whole. Then
    the units that the iteration uses next are sent for, one after the other; what is whole or
    was sent for already is passed over. A unit flies from then until its use, and is whole in
    memory. All that fly may have `budget` elements together; the first that would be too much
    is not sent for, and none behind it. One that flies alone may be larger, unless the budget
    is 0. After its use a unit is freed.
    Example: units [4, 8, 4], fp32, 2 ranks: kept 8 * 16. gathered with budget 0: 8 * 4; with
    budget 4: 12 * 4.
    """
    raise NotImplementedError("zero3_bytes")


# %% [markdown]
# ## 4. Read it

# %%
from refimpl.notebook import show
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

show.diff(Zero2, Zero3)

# %% [markdown]
# The largest of the three diffs, and still one idea: a bucket is now a `Unit`, which can be whole or not. (What is
# small may stay whole, in `kept`, and is handled as ZeRO-2 does it.) The hooks that make units whole are in `Fetch`.
# `after_forward` does what yours does: it asks to be called before the backward, and frees the module's units, except
# those that are used again soon. `need` runs before each forward and backward: it returns when the module's units are
# whole, and begins to gather those that come next.

# %%
from refimpl.zero.gather.fetch import Fetch

show.source(Fetch.after_forward, Fetch.need, docstrings=True)

# %% [markdown]
# `next_ones` is the prefetch. The first step writes down in which order units are used, the **trace**. From then on
# a unit that comes next is gathered while this one computes.
#
# A parameter that two modules share belongs to the lowest module around both. This GPT's head reads the weight of its
# token embedding, so that weight belongs to the model itself: gathered when the model's forward begins, and kept
# until it ends.

# %%
from refimpl import launch
from refimpl.comm.group import Group
from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.notebook import twin
from refimpl.plan.formulas import traffic
from refimpl.zero.config import ZeroConfig

config = GPTConfig(context=32, width=64, layers=4, heads=2)
OPTIONS = {"reduce_bucket_size": 50_000, "leaf_modules": ("Block",)}


def units():
    return [(unit.name, unit.numel) for unit in twin.start("zero3", config, **OPTIONS).units]


pd.DataFrame(launch.run(units, ranks=2)[0], columns=["gathered together, for", "elements"])

# %% [markdown]
# `leaf_modules=("Block",)` asks for a whole block at a time (DeepSpeed's `set_z3_leaf_modules`). Without it each linear
# layer and each norm is a unit: less memory, more messages.

# %% [markdown]
# ## 5. Measure it
#
# Bytes kept between backward and step in bf16 on four ranks, count and formula, for all stages:


# %%
def measure_all(ranks=4, micro_batches=1, dtype=torch.bfloat16):
    how = {"micro_batches": micro_batches, "dtype": dtype} | OPTIONS
    return {name: twin.measure(name, config, ranks, **how) for name in twin.STAGES}


measured = measure_all()
kept = {}
for name, found in measured.items():
    formula = memory_bytes(name, ranks=4, itemsize=2, layout=found.layout)
    kept[name] = show.compare(formula, {key: found.kept[key] for key in formula})
pd.concat(kept)

# %% [markdown]
# And bytes sent in one step, by purpose:

# %% tags=["hide-input"]
rows = {}
for name, found in measured.items():
    formula = {
        row.tag: row.bytes for row in traffic(name, ranks=4, itemsize=2, layout=found.layout)
    }
    rows[name] = show.compare(formula, found.sent_for)
pd.concat(rows)

# %% [markdown]
# ZeRO-3 gathers $2\Psi$ of parameters where the others gather $\Psi$ or nothing. The rest is one small all-reduce for
# the norm, which also tells which parameters no rank has used. In units of $\Psi b\frac{N-1}{N}$, with one and with
# three micro-batches:


# %%
def times_sent(found):
    """In units of the padded parameters' bytes, times (N-1)/N."""
    sent = found.sent_for["gradients"] + found.sent_for.get("parameters", 0)
    return f"{sent / (found.layout.padded * 2 * 3 / 4):.2f}"


table = {}
for a, results in ((1, measured), (3, measure_all(micro_batches=3))):
    table[f"A = {a}"] = {name: times_sent(found) for name, found in results.items()}
pd.DataFrame(table)

# %% [markdown]
# $2, 2, A + 1, 3A$. (It would be $A + 1$ for someone who has the memory to keep all weights whole from the first
# micro-batch to the last, as FSDP2 does with `reshard_after_forward=False` and, until the last one,
# `set_reshard_after_backward(False)`.)
#
# **Beside FSDP2.** PyTorch's `fully_shard` is the same idea with other choices (in FSDP1 its name was `FULL_SHARD`):
#
# | | refimpl, as DeepSpeed | FSDP2 |
# |---|---|---|
# | over which ranks | all of them, or groups that repeat each other: `mics_shard_size` | those of a mesh; in a mesh of two axes divided along the second and repeated along the first: HSDP |
# | what is cut | a unit's parameters end to end, in $N$ flat pieces | each parameter along its first dimension, as a `DTensor` |
# | what is gathered together | a module's own parameters; `leaf_modules` takes more | what one call of `fully_shard` wraps |
# | what has been gathered | is the weights, end to end: parameters are views of it | lies rank by rank, some rows of each weight: copied out |
# | after forward | freed, unless needed again soon (`max_reuse_distance`) | freed, or kept: `reshard_after_forward` |
# | prefetch | by the order that the first step wrote down | forward: as far as the CPU runs ahead; backward: the reverse order |
# | masters | fp32 shards beside the 16-bit ones | shards are fp32, cast before they are gathered |
# | reduction dtype | `communication_data_type` | `MixedPrecisionPolicy(reduce_dtype=...)` |
# | `p.grad` | an object that knows the other parts | a `DTensor` |
# | checkpoint | gathered, or each rank's part | each rank's `DTensor`, no communication |
# | ranks on other paths | named by the roll call (section 6) | hang, or the wrong weights |
#
# A flat piece may end in the middle of a row, which an element-wise optimizer does not mind; pieces of whole rows suit
# optimizers that look at a matrix, quantization by rows, and tensor parallelism (chapters 10 and 11).
#
# **HSDP**, hybrid sharding (the first row), is chapter 1's two levels. Shard over the $S$ ranks of a node, and keep a
# copy in each of $R$ nodes: gathers stay on the fast links, and between nodes goes one all-reduce of a gradient shard.
# (In DeepSpeed it was called MiCS, until 0.19.6; ZeRO++ keeps only a second copy of the weights in each node.) Memory
# falls by $S$ and not by $N = RS$. A 7B model in bf16 on 8 nodes of 8 GPUs, if each rank gets every piece straight from
# its owner:

# %% tags=["hide-input"]
weights, nodes, local = 7e9 * 2, 8, 8
all_ranks = nodes * local
pd.DataFrame(
    {
        "state, GB a rank": [8 * weights / all_ranks / 1e9, 8 * weights / local / 1e9],
        "sent to other nodes, GB a rank and step": [
            3 * weights / all_ranks * (all_ranks - local) / 1e9,
            2 * weights / local * (nodes - 1) / nodes / 1e9,
        ],
    },
    index=["ZeRO-3 over 64", "HSDP, 8 x 8"],
).round(2)

# %% [markdown]
# Now the order of things. The ledger of one rank in its second step: when each gather and each reduction started, when it
# was waited for, and which block computed meanwhile. First without prefetch, then with one of 60,000 elements, room for
# one block. (The axis counts events, because the order is what the algorithm decides. Seconds depend on the machine.)


# %%
from refimpl.notebook import timeline


def one_step(prefetch):
    """Compute and traffic of the second step."""
    stage = twin.start("zero3", config, prefetch_bucket_size=prefetch, **OPTIONS)
    ledger, batches = stage.group.ledger, twin.data()
    timeline.watch(stage.model.blocks, ledger)
    for step in range(2):
        ledger.reset()
        stage.backward(stage.model(*batches.batch(step, stage.group.rank)))
        stage.step()
    return timeline.bars_of(ledger.events)


timelines = {
    "no prefetch": launch.run(one_step, 0, ranks=2)[0],
    "prefetch": launch.run(one_step, 60_000, ranks=2)[0],
}
for name, bars in timelines.items():
    gathers = sum(bar.lane == "gather" for bar in bars)
    print(
        f"{name:12} {gathers} gathers, {timeline.hidden(bars)} of them on their way while a block computes"
    )

# %% tags=["hide-input"] alt="Two timelines of one step. Without prefetch a gather stands before its block; with it gathers run beside blocks"
import matplotlib.pyplot as plt

timeline.draw(timelines)
plt.show()

# %% [markdown]
# Above, every gather stands alone: the block waits for its weights. (The 4 that are counted there are the blocks' own in
# backward: each one's backward has begun, and waits for its gather.) Below, gathers run under the blocks before them.
# The price is memory, because what is prefetched is whole earlier. `prefetch_bucket_size` and `max_live_parameters` are
# the limits, in elements. Turn the knobs (here the prefetch may be as large as a bucket):

# %% tags=["hide-input"]
from refimpl.notebook.widgets_zero import memory_knobs

memory_knobs(GPTConfig(width=256, layers=16), bucket_size=(500_000, 5_000_000))

# %% [markdown]
# One question is open. If the model is larger than a rank's memory, who builds it? Inside `with Init():`, DeepSpeed's
# `deepspeed.zero.Init`, each module is cut as soon as its constructor returns. The meter counts the highest number of
# live bytes while a GPT is built. (On rank 1: all take their start from rank 0, and rank 0 keeps copies of what it
# sends until all have read them.)

# %%
from refimpl.zero.init import GatheredParameters, Init


def building(sharded):
    with MemoryMeter(dict) as meter, Init(enabled=sharded):
        model = GPT(GPTConfig(context=32, width=64, layers=8, heads=2))
    return sum(meter.at_peak.values()) / model.config.parameters


whole, cut = (
    launch.run(building, sharded, ranks=4)[1] for sharded in (False, True)
)  # of rank 1
print(
    f"highest count while the model is built: {whole:.1f} bytes a parameter; with Init {cut:.1f}"
)

# %% [markdown]
# And to look at a weight, or to change it? A freed parameter has its shape and no values. Inside
# `GatheredParameters` it is whole; with `modifier_rank=0` what rank 0 writes is kept.

# %%
# %%ranks 2
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.zero.config import ZeroConfig
from refimpl.zero.init import GatheredParameters
from refimpl.zero.zero3 import Zero3

config = GPTConfig(context=32, width=64, layers=4, heads=2)
batches = Batches(corpus(), context=32, size=2)
torch.manual_seed(0)
model = GPT(config)
stage = Zero3(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group)
scale = model.ln.weight

print("outside:", scale)
with GatheredParameters(scale, modifier_rank=0), torch.no_grad():
    print("inside: ", scale[:3].tolist())
    if rank == 0:
        scale.mul_(2)
with GatheredParameters(scale):
    print("changed:", scale[:3].tolist())

# %% [markdown]
# ## 6. Break it
#
# **A parameter used outside.** A loss term on a weight, written where such terms are usually written, in the training
# loop. But in the loop no module runs, so nobody gathers:

# %% tags=["raises-exception"]
# %%ranks 2
loss = model(*batches.batch(0, micro=rank)) + 0.01 * model.wte.weight.square().mean()

# %% [markdown]
# While it is freed, a parameter is of a class that lets nobody compute with it: an error at the first use, where an
# empty tensor (DeepSpeed) or old memory would give wrong numbers. It cannot simply be gathered here: gathering takes
# all ranks, and perhaps only this one has come to this line. The remedy is to move the term into a `forward`. A use
# inside a running module is noticed, and the weight is gathered for that module, whichever module owns it:


# %%
# %%ranks 2
class Regularised(torch.nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens, targets):
        return self.gpt(tokens, targets) + 0.01 * self.gpt.wte.weight.square().mean()


torch.manual_seed(0)
model = Regularised(GPT(config))
stage = Zero3(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group)
loss = model(*batches.batch(0, micro=rank))
stage.backward(loss)
print("finite:", bool(loss.isfinite()), "| stepped:", stage.step())

# %% [markdown]
# **Ranks that take different branches.** Early exit, layer drop, a mixture of experts: each rank decides by its own
# data. Under DDP that is allowed. Under ZeRO-3 the gather in a branch is a collective, and collectives match by
# position. Rank 0 gathers `first` while rank 1 gathers `second`. If they are equally large, both compute with a mixture
# of two layers, and nothing ever says so. If not, the job hangs. The **roll call** finds it before the first wrong
# number. Each rank expects that the others do what all did at this place the last time, and as long as that holds
# nothing is said. A rank that is about to do something else, or comes to a new place, *calls*: it says what it is about
# to do, and begins nothing before every rank has said the same. A rank that waits in vain, for half a second, answers
# the call too.


# %% tags=["hide-input"]
predict(
    "Two ranks gather different layers of one size, and nobody compares. What happens?",
    "both compute with a mixture",
    options=["a hang", "an error", "both compute with a mixture"],
)


# %% tags=["raises-exception"]
# %%ranks 2
class Forked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        branch = self.first if x.sum() > 0 else self.second
        return branch(x).square().mean()


model = Forked()
stage = Zero3(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group)
stage.backward(model(torch.full((2, 8), 1.0 - 2 * rank)))

# %% [markdown]
# It names the module on each rank. This was the first step, where every path is new, so both ranks called. In a later
# step a fork is noticed after the half second. What does it cost when nothing is wrong? In the first step a call for
# each new place; then nothing is sent, the ranks only compare what they do with the trace:

# %% tags=["nbval-ignore-output"]
from refimpl.measure.clock import Clock


def with_and_without():
    """Milliseconds of rank 0's first step, and the median of its later ones. The two take turns."""
    stages = {
        f"check_order={check}": twin.start("zero3", config, check_order=check, **OPTIONS)
        for check in (True, False)
    }
    batches, clock = twin.data(), Clock(warmup=1)
    for step in range(40):
        for name, stage in stages.items():
            stage.group.barrier()
            with clock.time(name):
                stage.backward(stage.model(*batches.batch(step, stage.group.rank)))
                stage.step()
    return {name: [clock.ms[name][0], clock.median(name)] for name in stages}


timed = launch.run(with_and_without, ranks=2)[0]
pd.DataFrame(timed, index=["first step, ms", "later steps, ms"]).round(1)

# %% [markdown]
# The first step pays for its calls, and for new memory; in the later ones nothing can be told from noise. Without the
# roll call the same forked program ends, and no error tells that the weights were mixed:

# %%
# %%ranks 2
torch.manual_seed(0)
model = Forked()
x = torch.full((2, 8), 1.0 - 2 * rank)
right = model(x).item()  # before the model is cut
stage = Zero3(
    model, torch.optim.AdamW(model.parameters(), lr=1e-3), group, ZeroConfig(check_order=False)
)
with torch.no_grad():
    wrong = model(x).item()
print("right" if wrong == right else "silently wrong")

# %% [markdown]
# The remedy: run the same modules on all ranks and multiply what is not wanted by zero, or gather all branches together
# with `leaf_modules`.

# %% [markdown]
# ## 7. Prove it
#
# First the bits. Four stages against one process of plain torch, in fp32, on 2, 3 and 4 ranks; with three micro-batches
# (each in its own order of addition, chapter 5); and in bf16, where there is no plain twin, against DDP.


# %%
def same(results, truths):
    return {name: twin.equal(found.weights, truths[name]) for name, found in results.items()}


parity = {}
for n in (2, 3, 4):
    truth = twin.one_process(config, ranks=n)
    parity[f"fp32, {n} ranks"] = same(
        measure_all(n, dtype=torch.float32), dict.fromkeys(twin.STAGES, truth)
    )

own, across = (twin.one_process(config, 3, 3, ranks_first) for ranks_first in (False, True))
own_order = {"ddp": own, "zero1": own, "zero2": across, "zero3": across}
parity["fp32, 3 ranks, A = 3"] = same(measure_all(3, 3, torch.float32), own_order)
parity["bf16, 4 ranks, to DDP"] = same(
    measured, dict.fromkeys(twin.STAGES, measured["ddp"].weights)
)
pd.DataFrame(parity)

# %% [markdown]
# Cutting the optimizer, the gradients and the weights has changed nothing that is computed.
#
# Now memory, and no longer counted by ourselves. Linux can forbid a process to own more than so many bytes of data
# (`RLIMIT_DATA`). A GPT of 38 million parameters in fp32 needs 608 MB of parameters, gradients and optimizer state.
# Each rank gets **240 MB** from the moment before the model is built. Whoever asks for more gets the allocator's error.
# (macOS sets no such limit: there all four train.)

# %%
import ctypes
import hashlib
import re
import resource
import sys
from pathlib import Path

big = GPTConfig(context=32, width=512, layers=12, heads=8)
BUDGET = 240_000_000


def attempt(name, budget):
    """On every rank: two steps with at most `budget` bytes more than now. Losses, a checksum."""
    # M_MMAP_MAX and M_MMAP_THRESHOLD of glibc: freed buffers go back at once
    if sys.platform == "linux":
        for option in (-4, -3):
            ctypes.CDLL(None).mallopt(option, 1 << 16)
    group = Group.world(
        transport="gloo"
    )  # memory that ranks share would not count as data of one of them
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if budget and sys.platform == "linux":
        now = (
            int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
            * 1024
        )
        resource.setrlimit(resource.RLIMIT_DATA, (now + budget, hard))
    torch.manual_seed(0)
    with Init(group, enabled=name == "zero3"):
        model = GPT(big)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = ZeroConfig(reduce_bucket_size=1_050_000, prefetch_bucket_size=0)
    stage, losses = twin.STAGES[name](model, adamw, group, config), []
    batches = Batches(corpus(), context=32, size=1)
    for step in range(2):
        loss = model(*batches.batch(step, group.rank))
        stage.backward(loss)
        stage.step()
        losses.append(loss.item())
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    weights = stage.full_state_dict() or {}
    return losses, hashlib.sha256(
        b"".join(w.numpy().tobytes() for w in weights.values())
    ).hexdigest()


outcomes, finished = {}, {}
for name in twin.STAGES:
    needs = sum(
        memory_bytes(name, ranks=4, itemsize=4, layout=Layout(big.parameters, 0, 0)).values()
    )
    try:
        finished[name] = launch.run(attempt, name, BUDGET, ranks=4)
        outcome = "trains"
    except launch.RankError as error:
        outcome = re.search(r"DefaultCPUAllocator: [^:]+", str(error))[0]
    outcomes[name] = [f"{needs / 1e6:.0f}", f"{BUDGET / 1e6:.0f}", outcome]
pd.DataFrame.from_dict(
    outcomes, orient="index", columns=["needs, MB (formula)", "may have, MB", "under the limit"]
)

# %% [markdown]
# DDP, ZeRO-1 and ZeRO-2 die in the allocator. ZeRO-3 trains: 152 MB of shards, and what is left holds units in use,
# buckets and activations. The weights were never whole on any rank, not even at the start: `Init` saw to that. And what
# it learned is what DDP learns with all the memory it wants:

# %%
unlimited = launch.run(attempt, "ddp", 0, ranks=4)
for step in range(2):
    print(f"step {step}: loss {sum(losses[step] for losses, _ in finished['zero3']) / 4:.1f}")
print("same bits as DDP without a limit:", finished["zero3"][0][1] == unlimited[0][1])

# %% [markdown]
# - **Exercises:** [exercises/06_zero3](../exercises/06_zero3/exercise.py): `pytest exercises/06_zero3`
# - **Quiz:** `refimpl quiz --topic zero`, or `Quiz("zero")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/zero/test_zero3.py](../tests/zero/test_zero3.py),
#   [tests/zero/test_order.py](../tests/zero/test_order.py) and [tests/zero/test_init.py](../tests/zero/test_init.py).
# - **Code:** [refimpl/zero/zero3.py](../refimpl/zero/zero3.py), [unit.py](../refimpl/zero/gather/unit.py),
#   [fetch.py](../refimpl/zero/gather/fetch.py), [prefetch.py](../refimpl/zero/gather/prefetch.py),
#   [path.py](../refimpl/zero/gather/path.py), [order.py](../refimpl/zero/gather/order.py), [init.py](../refimpl/zero/init.py).
# - **DeepSpeed:**
#   [deepspeed/runtime/zero/stage3.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero/stage3.py),
#   [partition_parameters.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero/partition_parameters.py)
#   and
#   [partitioned_param_coordinator.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero/partitioned_param_coordinator.py).
# - **Paper:** Rajbhandari et al. 2020, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), sections 5.3 and 7.2.2.
#   Freeing a storage in place is also how FSDP1 does it: `_free_storage` in
#   [torch/distributed/utils.py](https://github.com/pytorch/pytorch/blob/main/torch/distributed/utils.py). Its flat
#   parameters and its hooks: Zhao et al. 2023, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277), sections 4.2 and
#   4.3.
#
# That was the ladder: DDP, one diff, ZeRO-1, one diff, ZeRO-2, one diff, ZeRO-3. You have built it too: when your `Ddp`,
# `ShardedOptimizer`, `GradientShards` and `Zero3` have passed, `refimpl demo --yours` trains the demo's GPT by each of
# them, and compares bits with one process, bytes with the formulas.
#
# Next: [activations](07_activations.ipynb), the memory that no stage divides.
