# %% [markdown]
# # 5 · ZeRO-2: gradients that leave as they come
#
# ZeRO-1 cut the optimizer in N parts. A rank now updates only its own part, so it needs the mean gradient of that part
# alone. This chapter throws the rest away, at the right moment. That moment is inside backward.

# %% [markdown]
# ## 1. The pain: memory that nobody reads
#
# Train with ZeRO-1 on four ranks in bf16 and stop between backward and step. How many bytes of gradients are alive, and
# how many will the update read?

# %%
# %load_ext refimpl.notebook

# %%
# %%ranks 4
from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.zero.zero1 import Zero1

config = GPTConfig(context=32, width=64, layers=2, heads=2)
batches = Batches(corpus(), context=32, size=2)
torch.manual_seed(0)
model = GPT(config).to(torch.bfloat16)
stage = Zero1(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group)
stage.backward(model(*batches.batch(0, micro=rank)))

alive = MemoryMeter(stage.tensors).now()["gradients"]
read = sum(mean.nbytes for mean in stage.gradients.finish().values())
print(f"{alive:,} bytes of gradients alive, {read:,} to be read: 1/{alive // read}")

# %% [markdown]
# After the reduce-scatter, three quarters of the gradient buffers hold what this rank sent to others. Nobody reads it
# again, and it stays in memory until the step. With 64 ranks it would be 63 of 64 parts.

# %% [markdown]
# ## 2. The idea: a bucket at a time
#
# It is too late to free gradients after backward: then all of them have existed at once. So do not wait. Backward
# produces gradients from the last layer to the first. As soon as enough of them fill a **bucket**, the bucket travels
# by reduce-scatter, my $1/N$ of it stays, and the bucket's memory takes the next gradients.
#
# ```mermaid
# flowchart LR
#   B["backward fills a bucket"] -->|reduce-scatter| M["my 1/N of the mean stays"]
#   B -->|it has travelled| F["the bucket is empty again"]
#   F --> B
# ```
#
# In bf16, with $\Psi$ parameters on $N$ ranks, memory falls to
#
# $$2\Psi + \frac{2 + 12}{N}\,\Psi \quad\text{bytes, plus a few buckets.}$$
#
# The traffic of one step is still that of DDP: $\Psi$ for the reduce-scatter and $\Psi$ for the all-gather, so
# $2\Psi b\,\frac{N-1}{N}$ bytes. The paper (section 7.2.1) counts $2\Psi$ elements, as many as in data parallel
# training. That is so for one micro-batch a step. Section 5 counts what happens with more.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "bf16 and AdamW on 4 ranks. How many bytes a parameter does ZeRO-2 keep?",
    2 + (2 + 12) / 4,
    unit="bytes",
    why="2 + 14/N",
)

# %% [markdown]
# ## 3. Build it
#
# PyTorch calls a **post-accumulate hook** the moment a parameter's gradient is complete, in the middle of backward. In
# the bare form below there are no buckets: every gradient leaves by itself. `reduce` is the whole of ZeRO-2: send, keep
# my part, forget the rest. (Four ranks divide every parameter of this GPT, so nothing needs padding.)


# %%
# %%ranks 4
class Collector:
    """Each gradient is reduced as it comes, or when backward is over; this rank keeps its part."""

    def __init__(self, model, as_they_come=True):
        self.params, self.shards = list(model.parameters()), {}
        for p in self.params if as_they_come else []:
            p.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, p):
        mine = torch.empty(p.numel() // world_size)  # [n] -> [n/N]
        group.reduce_scatter(mine, p.grad.flatten(), "mean")
        p.grad = None
        self.shards[p] = self.shards.get(p, 0) + mine

    def tensors(self):
        grads = [p.grad for p in self.params if p.grad is not None]
        return {"gradients": [*grads, *self.shards.values()]}


# %% [markdown]
# The meter watches every operation of backward and remembers the highest count:


# %%
# %%ranks 4
def whole_gradient():
    torch.manual_seed(0)
    model = GPT(config)
    model(*batches.batch(0, micro=rank)).backward()
    return model


def collected(as_they_come):
    torch.manual_seed(0)
    model = GPT(config)
    collector = Collector(model, as_they_come)
    with MemoryMeter(collector.tensors) as meter:
        model(*batches.batch(0, micro=rank)).backward()
        for p in collector.params:
            if p.grad is not None:
                collector.reduce(p)
    return collector, meter.peak["gradients"], meter.now()["gradients"]


psi = config.parameters
print("bytes per parameter       peak   afterwards")
for name, as_they_come in (("when backward is over", False), ("as they come", True)):
    collector, peak, after = collected(as_they_come)
    print(f"{name:24}  {peak / psi:4.2f}   {after / psi:10.2f}")

# %% [markdown]
# In fp32 a whole gradient is 4 bytes a parameter. Whoever waits for the end of backward has had all of it. As they come,
# the peak is what must remain, $4/N = 1$, and for a moment the gradient of one parameter. (In a large model that hardly
# counts.) Same numbers? Gather the shards and compare them with the mean gradient that an all-reduce computes:

# %%
# %%ranks 4
collector, _, _ = collected(as_they_come=True)
equal = []
for mine, plain in zip(collector.params, whole_gradient().parameters(), strict=True):
    group.all_reduce(plain.grad, "mean")
    shard = collector.shards[mine]
    gathered = torch.empty(len(shard) * world_size)
    group.all_gather(gathered, shard)
    equal.append(torch.equal(gathered[: plain.numel()], plain.grad.flatten()))
print(sum(equal), "of", len(equal), "gradients equal")

# %% [markdown]
# But 28 messages, most of them tiny. So several gradients share a bucket, and it leaves when it is full.

# %% tags=["hide-input"]
predict(
    "What happens to a bucket, in which order?",
    [
        "its gradients arrive",
        "it is reduce-scattered",
        "a shard stays",
        "its memory is filled again",
    ],
    order=True,
)

# %% [markdown]
# **Your turn.** Write the class and run the cell: it is saved in your exercise's file and graded on real ranks in a
# second or two. (Chapter 2's `assign_buckets` is given there, and the file's head lists what `group` can do.)
# `%hint 05_zero2 GradientShards` helps.


# %%
# %%task 05_zero2 GradientShards
class GradientShards:
    """Reduce-scatters gradients bucket by bucket inside backward; keeps this rank's shards and
    nothing else.

        gradients = GradientShards(model, group, limit=1000)
        for micro_batch in step:
            model(micro_batch).backward()   # the hooks launch the buckets, in one order
            gradients.finish()              # all have travelled, and added to the shards
        update(gradients.shards)            # bucket number -> [S]: mean over ranks, sum over
                                            # micro-batches
        gradients.shards.clear()

    At most one bucket is under way, in the dtype of the gradients. Memory besides the shards:
    the bucket under way, and the gradients that wait for their bucket to fill. Traffic: one
    reduce-scatter a bucket and micro-batch.
    """

    def __init__(self, model: nn.Module, group: Group, limit: int) -> None:
        """Put a hook on every parameter that is not frozen.

        All ranks have the same weights already.
        """
        raise NotImplementedError("GradientShards.__init__")

    def on_gradient(self, p: nn.Parameter) -> None:
        """Runs inside backward, when p.grad is complete: launch the buckets that are full now,
        in order.
        """
        raise NotImplementedError("GradientShards.on_gradient")

    def launch(self) -> None:
        """Copy the next bucket's gradients into a flat buffer, free them, and start its
        reduce-scatter.
        """
        raise NotImplementedError("GradientShards.launch")

    def settle(self) -> None:
        """If a bucket is under way: wait for it, add its result to the shards, and let go of
        its buffer.
        """
        raise NotImplementedError("GradientShards.settle")

    def finish(self) -> None:
        """After each backward: launch what never filled, wait for the last one, and be ready
        for the next backward.
        """
        raise NotImplementedError("GradientShards.finish")


# %% [markdown]
# How large should a bucket be? (`yours` brings your class, once it has passed, and until then one that does the same.)

# %%
# %%ranks 4
from refimpl.notebook.yours import yours

GradientShards = yours("05_zero2", "GradientShards")
print("bucket size   messages   kept after backward, bytes per parameter")
for limit in (10**9, 40_000, 16_384, 1):
    torch.manual_seed(0)
    model = GPT(config)
    gradients = GradientShards(model, group, limit)
    group.ledger.reset()
    model(*batches.batch(0, micro=rank)).backward()
    gradients.finish()
    messages = group.ledger.calls()["reduce_scatter"]
    kept = sum(shard.nbytes for shard in gradients.shards.values())
    print(f"{limit:13,}   {messages:6}   {kept / psi:12.2f}")

# %% [markdown]
# What remains is the same. One bucket for the whole model means "when backward is over"; what the others cost meanwhile
# is counted in section 5.

# %% [markdown]
# One thing is missing. `Collector.reduce` waits: while a gradient travels, backward stands still. The order of events
# says so (`.` a gradient, `[` a reduce-scatter begins, `]` it is done), and beside it stands that of the real stage:


# %%
# %%ranks 4
from refimpl.zero.config import ZeroConfig
from refimpl.zero.zero2 import Zero2


def order():
    events = [e for e in group.ledger.events if e.op == "reduce_scatter" or e.phase == "mark"]
    return "".join({"mark": ".", "start": "[", "end": "]"}[e.phase] for e in events)


class Marked(Collector):
    def reduce(self, p):
        group.ledger.mark("gradient")
        super().reduce(p)


model = GPT(config)
waits = Marked(model)
group.ledger.reset()
model(*batches.batch(0, micro=rank)).backward()
print("Collector", order())

model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
stage = Zero2(model, optimizer, group, ZeroConfig(reduce_bucket_size=16_384))
group.ledger.reset()
stage.backward(model(*batches.batch(0, micro=rank)))
print("Zero2    ", order())

# %% [markdown]
# In the second line a bucket is launched and backward goes on. Up to two are under way while a third fills; the fourth
# would need memory, so the oldest is waited for first.

# %% tags=["hide-input"]
predict(
    "Buckets 0, 1, 2, 3 are launched one after the other, two may be under way. What happens?",
    ["0 starts", "1 starts", "0 arrives", "2 starts", "1 arrives", "3 starts"],
    order=True,
    why="Only a launch that finds no room waits, and for the oldest alone.",
)

# %% [markdown]
# **Your turn.** Which buckets are under way, and what must be kept of each? Write the class and run the cell: it is
# saved in your exercise's file and graded on real ranks in a second or two. `%hint 05_zero2 InFlight` helps.


# %%
# %%task 05_zero2 InFlight
class InFlight:
    """Reduce-scatters on their way, at most `most` at a time, so that backward need not wait
    for the bucket before.

        flights = InFlight(group, most=2)
        flights.launch(0, flat)   # flat [P], padded, is under way, and is not copied
        flights.launch(1, other)
        flights.launch(0, third)  # bucket 0 of the next micro-batch: first waits for `flat`
        flights.land()            # all have arrived
        flights.shards            # bucket number -> [S]: mean over ranks, sum over its launches

    A launch waits only if `most` are under way, and then for the oldest alone. What has arrived
    is added to its shard, in memory of its own and in the dtype of the buffer, and the buffer
    is let go.
    """

    def __init__(self, group: Group, most: int) -> None:
        """Nothing is under way, and there are no shards."""
        raise NotImplementedError("InFlight.__init__")

    def launch(self, number: int, flat: Tensor) -> None:
        """Start the reduce-scatter of flat [P], the gradients of bucket `number`."""
        raise NotImplementedError("InFlight.launch")

    def settle(self) -> None:
        """Wait for the oldest, and add what has arrived to its shard."""
        raise NotImplementedError("InFlight.settle")

    def land(self) -> None:
        """Wait for all that are under way, the oldest first."""
        raise NotImplementedError("InFlight.land")


# %% [markdown]
# And when the shards are there: no rank has the whole gradient any more, so who knows its norm? `%hint 05_zero2
# clip_global_norm` helps. Then read on.


# %%
# %%task 05_zero2 clip_global_norm
def clip_global_norm(group: Group, shards: Mapping[str, Tensor], limit: float) -> float:
    """Clip, in place, gradients of which this rank holds the shards; returns their L2 norm
    before clipping.

    The norm is that of the whole gradient over all ranks, and when it exceeds `limit`, every
    element is multiplied by limit / norm: the same number on every rank. `shards` may be empty
    on some ranks. A tied parameter has two names for one and the same tensor, and counts once.
    Shards are fp32 or 16 bits (fp16 ends at 65504, and the square of 1e20 is too large for
    fp32). One all-reduce of one number.
    """
    raise NotImplementedError("clip_global_norm")


# %% [markdown]
# ## 4. Read it
#
# The real one has more to do (dtypes, unused parameters, two buckets in flight while a third fills), all of it shared
# with the other stages. Between ZeRO-1 and ZeRO-2 this is left:

# %%
from refimpl.notebook import show
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2

show.diff(Zero1, Zero2)

# %% [markdown]
# Two changes. The result of the reduction gets **memory of its own**: the last argument of `Reduction` is what stays in
# use until the step, the whole bucket in ZeRO-1, the shard here. So the bucket can be used again. And `backward`
# ignores `sync=False`: a gradient that must not stay cannot wait for the next micro-batch either.
#
# The hook is this. A gradient moves into its bucket (see `Filling`), `p.grad` is forgotten, and a bucket that nothing
# is missing from is launched:

# %%
from refimpl.zero.gradients import Gradients

show.source(Gradients.arrive)

# %% [markdown]
# ## 5. Measure it
#
# Bytes kept between backward and step, then bytes sent in one step with $A$ micro-batches; count and formula.

# %%
import pandas as pd
import torch

from refimpl import launch
from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPTConfig
from refimpl.notebook import twin
from refimpl.plan.formulas import by_collective, memory_bytes, traffic

config = GPTConfig(context=32, width=64, layers=2, heads=2)
STAGES = ("ddp", "zero1", "zero2")


def measure(name, micro_batches, ranks=4, dtype=torch.bfloat16):
    return twin.measure(
        name, config, ranks, micro_batches=micro_batches, dtype=dtype, reduce_bucket_size=40_000
    )


measured = {(name, a): measure(name, a) for name in STAGES for a in (1, 2, 4)}
kept = {}
for name in STAGES:
    found = measured[name, 1]
    formula = memory_bytes(name, ranks=4, itemsize=2, layout=found.layout)
    kept[name] = show.compare(formula, {key: found.kept[key] for key in formula})
pd.concat(kept)

# %% tags=["hide-input"]
predict(
    "With 4 micro-batches a step, how often does ZeRO-2 send all gradients or all weights?",
    4 + 1,
    why="A reduce-scatter for each micro-batch, and one all-gather.",
)

# %% tags=["hide-input"]
rows = {}
for (name, a), found in measured.items():
    formula = sum(by_collective(traffic(name, 4, 2, found.layout, micro_batches=a)).values())
    counted = sum(found.sent.values())
    once = found.layout.padded * 2 * 3 // 4  # Psi b (N-1)/N, with the padding
    rows[name, f"A = {a}"] = [formula, counted, f"{counted / once:.2f}"]
pd.DataFrame.from_dict(rows, orient="index", columns=["formula", "counted", "times Ψb(N-1)/N"])

# %% [markdown]
# DDP and ZeRO-1 send once a step, however many micro-batches there are. ZeRO-2 sends $A$ reduce-scatters and one
# all-gather, $(A + 1)\,\Psi b\frac{N-1}{N}$. At $A = 4$ that is two and a half times the traffic of ZeRO-1. This is the
# trade that the abstract of the paper does not mention: **accumulate much, and ZeRO-1 may be the better stage.** (The
# few hundred bytes on top are chapter 4's message of 31 numbers. DeepSpeed's ZeRO-2 by default all-reduces where this
# one reduce-scatters: $2A + 1$.)
#
# Now watch the memory during a backward, on a model of 2.4 million parameters. Each time a gradient arrives, count the
# gradient buffers of the stage, waiting or travelling:


# %%
larger = GPTConfig(context=32, width=128, layers=12, heads=2)


def during_backward(name, bucket_size):
    """(share of gradients that have arrived, bytes per parameter in gradients and buckets)."""
    stage = twin.start(name, larger, torch.bfloat16, reduce_bucket_size=bucket_size)
    batches = Batches(corpus(), context=32, size=1)
    meter = MemoryMeter(lambda: {key: stage.tensors()[key] for key in ("gradients", "buckets")})
    arrived, curve = 0, [(0.0, 0.0)]

    def sample(p):
        nonlocal arrived
        arrived += p.numel()
        curve.append(
            (arrived / larger.parameters, sum(meter.now().values()) / larger.parameters)
        )

    for p in stage.model.parameters():
        p.register_post_accumulate_grad_hook(sample)  # after the stage's own hook
    stage.backward(stage.model(*batches.batch(0, stage.group.rank)))
    return curve


curves = {
    (name, size): launch.run(during_backward, name, size, ranks=4)[0]
    for name, size in (("zero1", 70_000), ("zero2", 500_000), ("zero2", 70_000))
}
{
    f"{name}, buckets of {size:,}": f"{max(y for _, y in curve):.2f}"
    for (name, size), curve in curves.items()
}

# %% tags=["hide-input"] alt="Above: gradient bytes during backward rise to the end for ZeRO-1 and stay low for ZeRO-2. Below: traffic against micro-batches"
import matplotlib.pyplot as plt

figure, (left, right) = show.figure(6.4, rows=2)
for ((name, size), curve), colour in zip(
    curves.items(), ("#c44e52", "#8fb0d9", "#2a4d7c"), strict=True
):
    left.step(
        [x for x, _ in curve],
        [y for _, y in curve],
        where="post",
        color=colour,
        label=f"{name}, buckets of {size:,}",
    )
left.axhline(2 / 4, color="grey", lw=0.8, ls=":")
left.text(1, 2 / 4, "2/N, what must stay", color="grey", ha="right", va="top", fontsize=9)
left.set(
    xlabel="share of gradients arrived in this backward",
    ylabel="bytes per parameter",
    title="Gradients and their buckets",
    ylim=(0, 3),
)
for name, colour, theory in (
    ("ddp", "#999999", lambda a: 2),
    ("zero1", "#c44e52", lambda a: 2),
    ("zero2", "#2a4d7c", lambda a: a + 1),
):
    once = measured[name, 1].layout.padded * 2 * 3 / 4
    counted = [sum(measured[name, a].sent.values()) / once for a in (1, 2, 4)]
    right.plot(
        (1, 2, 4),
        [theory(a) for a in (1, 2, 4)],
        color=colour,
        lw=1,
        ls="--" if name == "zero1" else "-",
    )
    right.plot(
        (1, 2, 4),
        counted,
        "so"[name != "ddp"],
        color=colour,
        label=name,
        ms=9 if name == "ddp" else 5,
    )
right.set_xticks((1, 2, 4))
right.set(
    xlabel="micro-batches a step, A",
    ylabel="times Ψb(N-1)/N",
    title="Bytes sent (dots counted)",
    ylim=(0, 5.5),
)
for axis in (left, right):
    axis.legend(frameon=False, fontsize=9, loc="upper left")
plt.show()

# %% [markdown]
# ZeRO-1 climbs by a bucket at a time and never comes down. ZeRO-2 climbs until its buffers exist (two that travel while
# a third fills; over a network also two in which others' gradients arrive) and then only by the shards that stay. The
# buffers do not grow with the model, so beside a large one they hardly count. Here, buckets of a fifth of the model eat
# up most of what sharding saves. Small buckets need less memory, and cost more messages of at least $\alpha$ each.
#
# **When does ZeRO-2 save nothing?** Beside its shards, $\Psi/N$ elements, it keeps three buckets of $B$ at most (two
# travel while a third fills); ZeRO-1 keeps all $\Psi$. They are even at
#
# $$\frac{\Psi}{N} + 3B = \Psi \qquad\Rightarrow\qquad B = \frac{N-1}{3N}\,\Psi,$$
#
# a quarter of the model on 4 ranks, a third on many. Count it on both sides of that:

# %%
rows = {}
for share in (32, 8, 4, 2):
    size = larger.parameters // share
    peak = max(y for _, y in launch.run(during_backward, "zero2", size, ranks=4)[0])
    at_most = 2 * (1 / 4 + 3 / share)
    rows[f"Ψ/{share}"] = [f"{at_most:.2f}", f"{peak:.2f}", f"{2 - peak:.2f}"]
pd.DataFrame.from_dict(
    rows, orient="index", columns=["formula, at most", "counted", "saved, of 2 bytes"]
)

# %% [markdown]
# (Below the formula where the largest bucket is not full, or where there are fewer than three.) Turn the knobs:

# %% tags=["hide-input"]
from refimpl.notebook.widgets_zero import memory_knobs

memory_knobs(
    GPTConfig(width=256, layers=6),
    bucket_size=(100_000, 500_000, 5_000_000),
    strategies=("zero1", "zero2"),
)

# %% [markdown]
# With buckets of 5 million elements, more than the model has, ZeRO-2 is *worse* than ZeRO-1: a bucket that holds
# everything frees nothing. DeepSpeed's default is 500 million elements. For a small model, lower it.

# %% [markdown]
# ## 6. Break it
#
# **Reading `p.grad`.** Most training loops have a line that clips gradients between backward and step. Under ZeRO-2 the
# gradients have left by then. What does the line do to a `Collector`?

# %% tags=["hide-input"]
predict(
    "All `p.grad` are None. What does `clip_grad_norm_` return?",
    "0",
    options=["an error", "0", "the norm of this rank's shard"],
    why="The norm of nothing, and nobody is told.",
)

# %%
# %%ranks 4
torch.manual_seed(0)
model = GPT(config)
collector = Collector(model)
model(*batches.batch(0, micro=rank)).backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)  # the famous line
print("clip_grad_norm_ says:", norm.item())
print("gradients it saw:", sum(p.grad is not None for p in model.parameters()))

# %% [markdown]
# No error, a norm of zero, and training goes on **unclipped**. A log of `p.grad.norm()` fails at least with an
# `AttributeError`; this line does not. Look for norms that are exactly 0. One remedy is to let the stage clip, because
# it alone can sum over the shards: `ZeroConfig(gradient_clipping=0.1)`, and `stage.grad_norm` to log. The other is to
# let `p.grad` be an object that knows where the rest of it is. FSDP2 does that with a `DTensor`, torch's tensor in
# parts; here it is a tensor of the parameter's shape that holds this rank's part and answers a question for its norm
# with an all-reduce. What the step then sees is the clipped gradient, whose norm is 0.1:

# %%
# %%ranks 4
from refimpl.zero.zero2 import Zero2

torch.manual_seed(0)
model = GPT(config)
stage = Zero2(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group)
model(*batches.batch(0, micro=rank)).backward()
print(model.wte.weight.grad)
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
stage.step()
print(f"clip_grad_norm_ says {norm.item():.1f}, the step saw {stage.grad_norm:.1f}")

# %% [markdown]
# **The lost micro-batch.** In `Collector.reduce` there is a sum: `self.shards.get(p, 0) + mine`. Leave it out, as is natural
# with a single micro-batch in mind, and each backward overwrites what the one before had reduced. The loss still falls.
# A test that finds it needs no reference: feed the **same** micro-batch $A$ times, and the gradient must be $A$ times
# as large.


# %%
# %%ranks 4
class Overwriting(Collector):
    def reduce(self, p):
        self.shards.pop(p, None)  # has the effect of `self.shards[p] = mine`
        super().reduce(p)


def norm_of(kind, backwards):
    torch.manual_seed(0)
    model = GPT(config)
    collector = kind(model)
    for _ in range(backwards):
        model(*batches.batch(0, micro=rank)).backward()
    square = torch.stack([s.square().sum() for s in collector.shards.values()]).sum()
    group.all_reduce(square)
    return square.sqrt()


for kind in (Collector, Overwriting):
    print(
        f"{kind.__name__:11} 4 backwards are {norm_of(kind, 4) / norm_of(kind, 1):.2f} times one"
    )

# %% [markdown]
# `1.00` where `4.00` belongs: three of four micro-batches were computed, sent, and thrown away. (DeepSpeed 0.19.8 does
# this in stages 1 and 2 when its engine was configured for one micro-batch a step and `backward` is called more often.
# Its stages 0 and 3 add.) The same test on the real stage:


# %%
# %%ranks 4
def norm_after(backwards):
    torch.manual_seed(0)
    model = GPT(config)
    stage = Zero2(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group)
    for _ in range(backwards):
        stage.backward(model(*batches.batch(0, micro=rank)))
    stage.step()
    return stage.grad_norm


print(f"Zero2       4 backwards are {norm_after(4) / norm_after(1):.2f} times one")

# %% [markdown]
# ## 7. Prove it
#
# Against one process of plain torch, bit for bit in fp32. With several micro-batches the order of the additions is part
# of the statement. DDP and ZeRO-1 add up their own micro-batches first and the ranks last. ZeRO-2 reduces each
# micro-batch over ranks as it comes. Floating-point addition is not associative, so each is compared with its own
# order.


# %%
def bits(name, micro_batches, first):
    ours = measure(name, micro_batches, ranks=3, dtype=torch.float32).weights
    return twin.equal(
        ours, twin.one_process(config, 3, micro_batches, ranks_first=first == "ranks")
    )


pd.DataFrame(
    [
        [name, a, first, bits(name, a, first)]
        for name, a, first in (
            ("zero1", 1, "micro-batches"),
            ("zero2", 1, "micro-batches"),
            ("zero1", 3, "micro-batches"),
            ("zero2", 3, "ranks"),
            ("zero2", 3, "micro-batches"),
        )
    ],
    columns=["stage", "micro-batches", "added first", "equal bits"],
)

# %% [markdown]
# The last row is there to show that the order matters: the same numbers, added otherwise, are other bits.
#
# - **Exercises:** [exercises/05_zero2](../exercises/05_zero2/exercise.py): `pytest exercises/05_zero2`
# - **Quiz:** `refimpl quiz --topic zero`, or `Quiz("zero")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/zero/test_stages.py](../tests/zero/test_stages.py)
# - **Code:** [refimpl/zero/zero2.py](../refimpl/zero/zero2.py),
#   [refimpl/zero/gradients.py](../refimpl/zero/gradients.py).
# - **DeepSpeed:**
#   [deepspeed/runtime/zero/stage_1_and_2.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero/stage_1_and_2.py),
#   `reduce_ipg_grads`.
# - **Elsewhere:** nearest are `SHARD_GRAD_OP` in PyTorch's FSDP and `reshard_after_forward=False` in FSDP2: weights stay
#   whole from forward until backward is over. Between steps they are in parts there, as in ZeRO-3.
# - **Paper:** Rajbhandari et al. 2020, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), sections 5.2
#   ($P_{os+g}$) and 7.2.1.
#
# Next: [ZeRO-3](06_zero3.ipynb). Two bytes a parameter are left on every rank, however many ranks there are: the
# weights.
