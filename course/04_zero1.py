# %% [markdown]
# # 4 · ZeRO-1: one optimizer in N parts
#
# In bf16 with AdamW a parameter costs 16 bytes, and 12 of them belong to the optimizer: the master weight and two
# running means. Data parallel training keeps all 12 on every rank. This chapter keeps them once, in N parts, and
# sends as many bytes as before, but for one number. You need chapters [1](01_collectives.ipynb), [2](02_ddp.ipynb) and
# [3](03_precision_and_bytes.ipynb).

# %% [markdown]
# ## 1. The pain: four ranks, four copies
#
# Train a small GPT with DDP on four ranks, in bf16, and stop between backward and step. What does each rank hold?

# %%
# %load_ext refimpl.notebook

# %%
# %%ranks 4
from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.zero.ddp import DDP

config = GPTConfig(context=32, width=64, layers=2, heads=2)
batches = Batches(corpus(), context=32, size=2)
torch.manual_seed(0)
model = GPT(config).to(torch.bfloat16)
stage = DDP(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group)
for step in range(3):
    stage.backward(model(*batches.batch(step, micro=rank)))
    if step < 2:
        stage.step()
memory = MemoryMeter(stage.tensors).now()
for name in ("parameters", "gradients", "optimizer", "master weights"):
    print(f"{memory[name] / config.parameters:5.2f} bytes per parameter: {name}")

# %% [markdown]
# Twelve of the sixteen bytes are optimizer state. Are they at least different on the four ranks? Take a checksum of
# all of it, and compare.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict("Four ranks train by DDP. How many different optimizer states are there?", 1)

# %%
# %%ranks 4
import hashlib

state = [*stage.update.state(), *stage.update.masters.values()]
digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in state)).hexdigest()
print(f"{sum(t.nbytes for t in state):,} bytes of optimizer state on this rank")
print(f"{len(set(group.all_gather_object(digest)))} different state(s) on {world_size} ranks")

# %% [markdown]
# One. After the all-reduce every rank has the same gradients, the same state and the same weights, so every rank
# computes the same AdamW step. Of the memory and of the work, three quarters are copies. With 64 ranks it would be 63
# of 64.

# %% [markdown]
# ## 2. The idea: cut the all-reduce open, and put the update in its middle
#
# Chapter 1 built the all-reduce from two halves. After the first half, the **reduce-scatter**, each rank holds the mean
# gradient of *its own* part, $1/N$ of all parameters: its **shard**. The second half, the **all-gather**, gives every
# rank all parts. DDP sends the gradients through both halves, and then updates everything everywhere. **ZeRO-1**
# updates in between: each rank steps its own part, and the all-gather carries new weights in place of gradients.
#
# ```mermaid
# flowchart LR
#   G["gradients of my text: Ψ"] -->|reduce-scatter| S["mean gradient of my part: Ψ/N"]
#   S -->|AdamW on Ψ/N| W["new weights of my part: Ψ/N"]
#   W -->|all-gather| P["all new weights: Ψ"]
#   G -.->|"DDP: all-reduce, then AdamW on Ψ"| P
# ```
#
# The bytes sent, for $\Psi$ parameters of $b$ bytes, do not change:
#
# $$\underbrace{2\Psi b\,\tfrac{N-1}{N}}_{\text{all-reduce}} = \underbrace{\Psi b\,\tfrac{N-1}{N}}_{\text{reduce-scatter}} + \underbrace{\Psi b\,\tfrac{N-1}{N}}_{\text{all-gather}}$$
#
# and the memory in bf16 falls from $2 + 2 + 12$ to $2 + 2 + 12/N$ bytes a parameter. First a check that the two halves
# give the bits of the whole:

# %% tags=["hide-input"]
predict(
    "What does ZeRO-1 send in a step, in units of what DDP sends?",
    1.0,
    why="Two halves are a whole.",
)

# %%
# %%ranks 4
x = torch.randn(
    1000, generator=torch.Generator().manual_seed(rank)
)  # [n], different on each rank
group.ledger.reset()

whole = x.clone()
group.all_reduce(whole, "mean")

halves = x.clone()
mine = halves.view(world_size, -1)[rank]  # [n] -> [n/N], a view: my part of the buffer
group.reduce_scatter(mine, halves, "mean")  # my part now holds the mean over ranks
group.all_gather(halves, mine)  # and now all parts do

print("equal bits:", torch.equal(whole, halves))
group.ledger.sent_bytes()

# %% [markdown]
# ## 3. Build it: a sharded AdamW
#
# "Part 2" must mean the same elements on all ranks. So first the parameters move end to end into one buffer, which can be
# cut anywhere, and each parameter becomes a **view** of its piece: whoever writes to the buffer changes the model. A
# **tied** parameter, one tensor under two names as this GPT's embedding and output layer, moves once.
#
# **Your turn.** Write the body and run the cell: it is saved in your exercise's file and graded on real ranks in a
# second or two. `%hint 04_zero1 flatten` helps.


# %%
# %%task 04_zero1 flatten
def flatten(model: nn.Module, ranks: int) -> Tensor:
    """Move the parameters that are trained into one buffer [P], and make each of them a view of
    its piece.

    P is the smallest multiple of `ranks` that holds them all; the padding at the end is zero.
    The order is that of model.parameters(), which names a tied parameter once. Frozen
    parameters stay where they are. Values and shapes stay the same. A parameter need not be
    contiguous. All trained parameters have one dtype, and the buffer has it too.
    """
    raise NotImplementedError("flatten")


# %% [markdown]
# And the stage itself. It differs from data parallel training in three places: what AdamW is given, which collective
# brings the gradients, and what happens after the step. `%hint 04_zero1 ShardedOptimizer` helps.


# %%
# %%task 04_zero1 ShardedOptimizer
class ShardedOptimizer:
    """Data parallel training in which each rank owns the optimizer's state of its shard only.

        sharded = ShardedOptimizer(model, group, lambda params: optim.AdamW(params, lr=1e-3))
        loss.backward()
        sharded.step()               # all ranks have the same new weights, and no gradients

    A step: one reduce-scatter of all gradients, in their dtype, the update of this rank's
    shard, one all-gather of all weights. Between steps nothing is kept but the weights and the
    shard's state: no gradient, no second buffer. The padding stays zero.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        make_optimizer: Callable[[list[nn.Parameter]], optim.Optimizer],
    ) -> None:
        """Flatten the model, give all ranks rank 0's parameters, frozen ones too, and make
        self.optimizer.

        self.optimizer = make_optimizer([shard]), where the shard is one nn.Parameter [S] in the
        memory of the buffer.
        """
        raise NotImplementedError("ShardedOptimizer.__init__")

    @torch.no_grad()
    def step(self) -> None:
        """Mean gradient of my shard, update, everyone's new shards.

        A gradient that is None counts as zero.
        """
        raise NotImplementedError("ShardedOptimizer.step")


# %% [markdown]
# How does one tell that it is right? By the weights of data parallel training, and by the bytes that AdamW keeps.
# (`yours` brings your class, once it has passed, and until then one that does the same.)


# %%
# %%ranks 4
from refimpl.notebook.yours import yours

ShardedOptimizer = yours("04_zero1", "ShardedOptimizer")


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3)


class Replicas:
    """Data parallel training: AdamW has all parameters, on every rank."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = GPT(config)
        self.optimizer = adamw(self.model.parameters())

    def update(self):
        for p in self.model.parameters():
            group.all_reduce(p.grad, "mean")
        self.optimizer.step()
        self.optimizer.zero_grad()


class Sharded:
    """ZeRO-1: AdamW has this rank's part."""

    def __init__(self, through=group):
        torch.manual_seed(0)
        self.model = GPT(config)
        stage = ShardedOptimizer(self.model, through, adamw)
        self.optimizer, self.update = stage.optimizer, stage.step


def train(trainer, number):
    loss = trainer.model(*batches.batch(number, micro=rank))
    loss.backward()
    trainer.update()
    return loss.item()


def state_bytes(optimizer):
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values())


# %% tags=["hide-input"]
predict(
    "bf16 and AdamW on 4 ranks. How many bytes a parameter does ZeRO-1 keep?",
    2 + 2 + 12 / 4,
    unit="bytes",
)

# %%
# %%ranks 4
ddp, zero1 = Replicas(), Sharded()
for number in range(5):
    train(ddp, number)
    train(zero1, number)
both = zip(ddp.model.parameters(), zero1.model.parameters(), strict=True)
print("equal bits after 5 steps:", all(torch.equal(a, b) for a, b in both))
print(
    f"optimizer state: {state_bytes(ddp.optimizer):,} bytes and {state_bytes(zero1.optimizer):,}"
)

# %% [markdown]
# A quarter of the state, and the same weights to the last bit. Why may one cut the parameters anywhere, even through
# the middle of a matrix? Because AdamW is **element-wise**: the new value of an element depends on its own gradient
# and its own two means, and on nothing else. Section 6 shows what happens to an optimizer for which that is not so.
#
# (Beside its means AdamW counts steps, 4 bytes for each tensor that it is given: 28 of them, and 1.)

# %% [markdown]
# A checkpoint, or a learning rate for biases alone, asks the other way round: what of which parameter lies in my part?
# `%hint 04_zero1 pieces_of` helps. Then read on.


# %%
# %%task 04_zero1 pieces_of
def pieces_of(sizes: Sequence[int], ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """What of which parameter lies in the shard of `rank`: (number, start, stop), in elements
    of that parameter.

    `sizes`: elements of each parameter, in the order of the buffer. A parameter may lie across
    several shards, and a shard may hold several parameters, or padding only; padding is
    nobody's piece. A parameter may have billions of elements.
    Example: sizes [3, 4], 2 ranks, shards of 4 -> rank 0: [(0, 0, 3), (1, 0, 1)]; rank 1:
    [(1, 1, 4)].
    """
    raise NotImplementedError("pieces_of")


# %% [markdown]
# ## 4. Read it
#
# The real classes also fill buckets while backward runs, keep fp32 master weights, and check for overflow. Those parts
# they share, so what is left between DDP and ZeRO-1 is this:

# %%
from refimpl.notebook import show
from refimpl.zero.ddp import DDP
from refimpl.zero.zero1 import Zero1

show.diff(DDP, Zero1)

# %% [markdown]
# `owned` is a shard of each bucket, and `reduce` is a reduce-scatter. The third place follows from the first: what a
# rank does not own must be gathered after the update. The shard is a view of the bucket, so the optimizer writes into
# the model's own memory, and the all-gather only has to fill in the other parts:

# %%
from refimpl.zero.flat import Bucket
from refimpl.zero.stage import Stage

show.source(Stage.gather, Bucket.shard, Bucket.gather)

# %% [markdown]
# ## 5. Measure it
#
# The same model with both stages, three steps in bf16. Bytes kept are counted between backward and step, bytes sent
# are those of the last step. Beside them stands what `refimpl.plan.formulas` says without looking.

# %%
import pandas as pd
import torch

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.notebook import twin
from refimpl.plan.formulas import by_collective, memory_bytes, traffic

config = GPTConfig(context=32, width=64, layers=2, heads=2)


def measure(name, ranks=4, dtype=torch.bfloat16):
    return twin.measure(name, config, ranks, dtype=dtype, steps=3, reduce_bucket_size=40_000)


measured = {name: measure(name) for name in ("ddp", "zero1")}
kept = {}
for name, found in measured.items():
    formula = memory_bytes(name, ranks=4, itemsize=2, layout=found.layout)
    kept[name] = show.compare(formula, {key: found.kept[key] for key in formula})
pd.concat(kept)

# %% [markdown]
# They agree to the byte, because the formula is told the layout: how many buckets there are, and how much padding
# (at most 255 elements a bucket here). Optimizer and master weights are a quarter; parameters and gradients are
# still whole. That is the business of the next two chapters. Now the bytes sent:

# %% tags=["hide-input"]
pd.concat(
    {
        name: show.compare(
            by_collective(traffic(name, 4, itemsize=2, layout=found.layout)), found.sent
        )
        for name, found in measured.items()
    }
)

# %% [markdown]
# ZeRO-1's reduce-scatter and all-gather add up to DDP's all-reduce of the gradients, exactly. The few hundred bytes
# that both all-reduce besides are one message of 31 numbers: of each of 28 parameters, how many ranks have not used it;
# two of a checksum, by which the ranks notice that their settings differ; and the sum of the gradient's squares. That
# last number is what ZeRO-1 must send beyond data parallel training: no rank sees the whole gradient any more, so the
# norm and the check for infinities need a sum over ranks. (DDP could do without it. Here it sends it too.)
#
# Count again for 1, 2, 3 and 4 ranks, and lay the formula $2 + 2 + 12/N$ over it:

# %% tags=["hide-input"] alt="Bytes per parameter on each rank against the number of ranks: DDP stays at 16, ZeRO-1 falls to 4"
import matplotlib.pyplot as plt

CLASSES = ("parameters", "gradients", "optimizer", "master weights")
worlds, more = [1, 2, 3, 4], [1, 2, 3, 4, 8, 16, 32, 64]
figure, axis = show.figure(3.4)
for name, colour, theory in (
    ("ddp", "#c44e52", [16.0] * len(more)),
    ("zero1", "#4c72b0", [4 + 12 / n for n in more]),
):
    found = [measure(name, n).kept for n in worlds]
    counted = [sum(kept[c] for c in CLASSES) / config.parameters for kept in found]
    axis.plot(more, theory, color=colour, lw=1, label=f"{name}, formula")
    axis.plot(worlds, counted, "o", color=colour, label=f"{name}, counted")
axis.axhline(4, color="grey", lw=0.8, ls=":")
axis.set(
    xscale="log", ylim=(0, 17.5), xlabel="ranks", ylabel="bytes per parameter on each rank"
)
axis.set_xticks(more, more)
axis.minorticks_off()
axis.legend(frameon=False, loc="center right")
plt.show()

# %% [markdown]
# The curve flattens at 4: weights and gradients, whole on every rank, however many ranks there are. Turn the knobs for
# a larger model. All numbers are bytes a parameter; the last part is an upper bound for the buffers that travel.

# %% tags=["hide-input"]
from refimpl.notebook.widgets_zero import memory_knobs

memory_knobs(
    GPTConfig(width=256, layers=6),
    bucket_size=(500_000, 5_000_000),
    strategies=("ddp", "zero1"),
)

# %% [markdown]
# **What the clock says.** Equal bytes are not equal time. DDP's all-reduce can travel under backward. Of ZeRO-1's two
# halves only the reduce-scatter can: new weights exist after the update, and by then there is nothing left to compute
# in this step. Time that nothing hides is **exposed**. The parts of a ZeRO-1 step, on 2 ranks:

# %% tags=["nbval-ignore-output"]
from refimpl.measure.clock import Clock


def exposed(config):
    """Median ms of the parts of a ZeRO-1 step. (The model does not use the flat buffers.)"""
    group, batches, clock = (
        Group.world(),
        Batches(corpus(), context=32, size=2),
        Clock(warmup=2),
    )
    model = GPT(config)
    flat = group.empty(-(-config.parameters // group.size) * group.size, torch.float32)
    grad = group.empty(flat.numel(), torch.float32)
    owned = torch.nn.Parameter(flat.view(group.size, -1)[group.rank])
    adamw = torch.optim.AdamW([owned], fused=True)
    for step in range(10):
        with clock.time("forward and backward"):
            model(*batches.batch(step, group.rank)).backward()
        owned.grad = grad.view(group.size, -1)[group.rank]
        group.barrier()
        with clock.time("reduce-scatter"):
            group.reduce_scatter(owned.grad, grad, "mean")
        with clock.time("AdamW on 1/N"):
            adamw.step()
        group.barrier()
        with clock.time("all-gather, exposed"):
            group.all_gather(flat, owned.data)
    return {name: clock.median(name) for name in clock.ms}


times = launch.run(exposed, GPTConfig(context=32, width=256, layers=4, heads=4), ranks=2)[0]
pd.Series(times).round(1).to_frame("ms")

# %% [markdown]
# The cure: do not wait for the whole all-gather. Cut the model in parts, each with a shard of its own, start all
# gathers after the update, and wait for a part's gather when the *next forward* comes to that part. Then all but the
# first travel under computation. (Megatron's distributed optimizer has it as `--overlap-param-gather`. refimpl's ZeRO-1
# gathers at the end of the step, so that `step()` leaves whole weights behind; its ZeRO-3 has no choice but to gather
# under forward.)
#
# The stage need not know of it. Here it is your class again, once for each part of the model, through a group that
# begins an all-gather and does not wait:


# %%
# %%ranks 4
class Later:
    """The group, except that an all-gather is only begun."""

    def __getattr__(self, name):
        return getattr(group, name)

    def all_gather(self, out, x):
        self.flight = group.all_gather(out, x, async_op=True, tag="parameters")


class UnderForward:
    """ZeRO-1 in parts; each part's new weights arrive while the parts before it compute."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, self.later, self.stages = GPT(config), {}, []
        for part in [self.model.wte, self.model.wpe, *self.model.blocks, self.model.ln]:
            self.later[part] = Later()
            self.stages.append(ShardedOptimizer(part, self.later[part], adamw))
            part.register_forward_pre_hook(self.arrive)

    def arrive(self, part, args):
        group.ledger.mark("forward needs a part")
        if hasattr(self.later[part], "flight"):
            self.later[part].flight.wait()

    def update(self):
        for stage in self.stages:
            stage.step()


late = UnderForward()
for number in range(5):
    group.ledger.reset()
    train(late, number)
late.model(*batches.batch(5, micro=rank))  # waits for what is still on its way
events = [e for e in group.ledger.events if e.tag == "parameters" or e.phase == "mark"]
begin = next(i for i, e in enumerate(events) if e.phase == "start")
order = "".join({"mark": ".", "start": "[", "end": "]"}[e.phase] for e in events[begin:])
print("[ a gather begins, . the next forward needs a part, ] its gather is done: ", order)
zipped = zip(zero1.model.parameters(), late.model.parameters(), strict=True)
print("equal bits after 5 steps:", all(torch.equal(a, b) for a, b in zipped))

# %% [markdown]
# The first part computes while four gathers are still open. The price is a rule: until the next forward has run, the
# weights are not whole, so an evaluation or a checkpoint between two steps must wait for all of them first.

# %% [markdown]
# ## 6. Break it
#
# **The stale shard.** Forget the all-gather. Each rank then has fresh weights in its own part and the initial weights
# in all others. Nothing raises and nothing hangs. Watch the loss:


# %%
# %%ranks 4
class Forgetful(Later):
    def all_gather(self, out, x):
        pass


good, bad = Sharded(), Sharded(through=Forgetful())
curves = []
for number in range(30):
    pair = torch.tensor([train(good, number), train(bad, number)])
    group.all_reduce(pair, "mean")
    curves.append(pair.tolist())


def end_to_end(tensors):
    """[P], a multiple of N: as a stage lays them out."""
    flat = torch.cat([t.detach().flatten() for t in tensors])
    return torch.nn.functional.pad(flat, (0, -len(flat) % world_size))


flat = end_to_end(bad.model.parameters())
models = len(set(group.all_gather_object(hashlib.sha256(flat.numpy().tobytes()).hexdigest())))
print(f"{models} different models on {world_size} ranks")

# %% tags=["hide-input"] alt="Two loss curves that both fall; the one without the all-gather falls more slowly"
curves = ranks.pull("curves")[0]
figure, axis = show.figure(3)
axis.plot([good for good, _ in curves], label="ZeRO-1", color="#4c72b0")
axis.plot([bad for _, bad in curves], label="all-gather forgotten", color="#c44e52")
axis.set(xlabel="step", ylabel="loss, mean over ranks", title="Both learn")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# **The loss falls anyway**, only more slowly, which looks like a learning rate that is too small. What gives it away
# is not the loss but the fact that must hold: after a step all ranks have the same weights. Checksum them. There are 4
# different models here, and there must be 1. This check fails from the first step on. `torch.equal`, part by part, then
# says which part is stale on which rank (part 0 first):

# %%
# %%ranks 4
everyone = torch.empty(world_size, flat.numel())
group.all_gather(everyone, flat)
parts = everyone.view(world_size, world_size, -1)  # [whose copy, which part, S]
first = end_to_end(Sharded().model.parameters()).view(world_size, -1)  # before training
[
    "fresh" if not torch.equal(parts[rank, part], first[part]) else "stale"
    for part in range(world_size)
]

# %% [markdown]
# **The local norm.** Clipping looks harmless: `clip_grad_norm_` on what the optimizer owns. But that is a shard, so it
# measures the norm of a shard, and each rank divides by another number.

# %%
# %%ranks 4
torch.manual_seed(0)
model = GPT(config)
model(*batches.batch(0, micro=rank)).backward()
gradient = end_to_end(p.grad for p in model.parameters())
mine = torch.empty(len(gradient) // world_size)
group.reduce_scatter(mine, gradient, "mean")
local = mine.norm()
square = local.square()
group.all_reduce(square)  # 4 bytes from each rank mend it
print(f"norm of my shard {local:.1f}, of the whole gradient {square.sqrt():.1f}")

# %% [markdown]
# The four shards of one gradient have four norms, so with a limit between them some ranks clip and others do not. The
# norm of the whole is one all-reduce of one number away; `stage.grad_norm` is that.
#
# **An optimizer that is not element-wise.** AdamW may be cut anywhere (section 3). May others?

# %% tags=["hide-input"]
predict(
    "Which of these computes something else when the parameters are cut anywhere?",
    "LAMB",
    options=["SGD with momentum", "AdamW", "LAMB"],
    why="It scales each layer's update by the norm of the layer's weights.",
)

# %% [markdown]
# LAMB scales each layer's update by $\lVert w\rVert / \lVert u\rVert$, the norms of the layer's weights and of its
# update. On a shard these are norms of whatever happens to lie there. It trains, and it is another optimizer. `Zero1`
# refuses what it does not know, such as LARS, the same idea around SGD:

# %% tags=["raises-exception"]
# %%ranks 4
from refimpl.zero.zero1 import Zero1


class Lars(torch.optim.SGD):
    """Steps each parameter by a share of its own norm."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p -= 1e-3 * p.norm() / p.grad.norm() * p.grad


model = GPT(config)
Zero1(model, Lars(model.parameters()), group)

# %% [markdown]
# What such an optimizer needs of the whole can be sent. `refimpl`'s LAMB hands the squares of its parts to the stage and
# gets back those of whole layers. **Muon** needs more: its step for a matrix is the momentum made orthogonal, so that
# all its directions are equally long, and whether two rows are orthogonal depends on both. The momentum itself is
# element-wise and stays cut. For the step the stage brings it together in bf16, makes the matrices of which this rank
# has a part, and keeps that part of them:

# %%
# %%ranks 4
from refimpl.optim.muon import Muon

model = GPT(config)
stage = Zero1(model, Muon(model.blocks.parameters()), group)
stage.backward(model(*batches.batch(0, micro=rank)))
group.ledger.reset()
stage.step()
sent = group.ledger.sent_bytes("tag")
elements = sum(p.numel() for p in model.blocks.parameters() if p.ndim > 1)
print(
    f"bytes sent an element of a matrix: {sent['matrices'] / elements:.2f} for its step, "
    f"{sent['parameters'] / elements:.2f} for the weights"
)

# %% [markdown]
# $2 (N-1)/N$ bytes and $4 (N-1)/N$ (and a little for biases and padding): half of what the fp32 weights take, as much as
# bf16 ones. The work is divided: most matrices lie in one rank's part, and that rank makes them alone.

# %% [markdown]
# ## 7. Prove it
#
# The strongest statement that one can make: four ranks with ZeRO-1 end with the weights of **one process** that takes
# the four micro-batches itself, adds their gradients in rank order, and calls plain AdamW (chapter 2's twin). Bit for
# bit, in fp32.

# %%
table = {}
for n in (2, 3, 4):
    truth = twin.one_process(config, ranks=n, steps=3)
    table[f"{n} ranks"] = {
        name: twin.equal(measure(name, n, torch.float32).weights, truth)
        for name in ("ddp", "zero1")
    }
pd.DataFrame(table)

# %% [markdown]
# - **Exercises:** [exercises/04_zero1](../exercises/04_zero1/exercise.py): `pytest exercises/04_zero1`
# - **Quiz:** `refimpl quiz --topic zero`, or `Quiz("zero")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/zero/test_stages.py](../tests/zero/test_stages.py), bits, bytes kept, bytes
#   sent, order of events.
# - **Code:** [refimpl/zero/zero1.py](../refimpl/zero/zero1.py), [refimpl/zero/flat.py](../refimpl/zero/flat.py),
#   [refimpl/zero/update.py](../refimpl/zero/update.py).
# - **DeepSpeed:**
#   [deepspeed/runtime/zero/stage_1_and_2.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero/stage_1_and_2.py).
#   It cuts the whole flat group in N pieces, where this code cuts each bucket; so a bucket of DeepSpeed's may belong to
#   one rank alone. By default (`use_multi_rank_bucket_allreduce`) it therefore all-reduces each bucket, of which a rank
#   keeps what is its own. That sends $3\Psi$ elements a step where the reduce-scatter here makes it $2\Psi$.
# - **Elsewhere:** in Megatron this is the distributed optimizer, `--use-distributed-optimizer`. PyTorch has
#   `ZeroRedundancyOptimizer`, in which each rank owns whole parameters and broadcasts them after the update.
# - **Paper:** Rajbhandari et al. 2020, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), sections 5.1
#   ($P_{os}$) and 7.2.
#
# Next: [ZeRO-2](05_zero2.ipynb). Each rank reads only its part of the mean gradient. Why does it keep all of it?
