# %% [markdown]
# # 2 · Data parallel: one all-reduce a step
#
# Every rank keeps the whole model and reads its own part of the batch. One all-reduce a step makes the ranks act as
# one process that read everything. In this chapter you build it three times (one call a parameter, buckets, overlap),
# read the version in `refimpl`, see what torch's does besides, count what is kept and sent, and break it in three ways.

# %%
# %load_ext refimpl.notebook
import pandas as pd
import torch

from refimpl.measure.clock import Clock
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig

torch.set_num_threads(1)  # as the ranks: a product split over threads may add in another order
shape = GPTConfig(context=64, width=64, layers=2, heads=2)
batches = Batches(corpus(), context=64, size=4)
print(f"{shape.parameters:,} parameters, {len(list(GPT(shape).parameters()))} tensors")

# %% [markdown]
# ## 1. The pain: one process reads slowly, and four alone learn apart
#
# One process has one way to read more text in a step: read longer. The time of a step grows with the batch.

# %% tags=["nbval-ignore-output"]
torch.manual_seed(0)
model = GPT(shape)
rows = []
for sequences in (4, 8, 16):
    clock, data = Clock(warmup=1), Batches(corpus(), context=64, size=sequences)
    for step in range(4):
        with clock.time():
            model(*data.batch(step, 0)).backward()
    rows.append({"sequences": sequences, "ms a step": round(clock.median())})
pd.DataFrame(rows)

# %% [markdown]
# So let four processes read at once. The cheap idea is to let each one train alone and to average the weights when all
# are done. Here are 60 steps of that, beside one process that reads all four shares in every step. The number is the
# loss on pieces of text drawn for grading alone; a byte guessed blindly costs $\ln 256 = 5.55$ (the unit of a natural
# logarithm is called a nat).

# %%
# %%ranks 4
from torch.optim import AdamW

from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig

shape = GPTConfig(context=64, width=64, layers=2, heads=2)
batches = Batches(corpus(), context=64, size=4)


def fresh(seed=0):
    torch.manual_seed(seed)
    return GPT(shape)


@torch.no_grad()
def score(model):
    exam = Batches(corpus(), context=64, size=32)
    return model(*exam.batch(10_000, 0)).item()


def alone(seed):
    model = fresh(seed)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        model(*batches.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = score(model)
    for p in model.parameters():
        group.all_reduce(p.data, "mean")
    return mine, score(model)


same_start, own_starts = alone(seed=0), alone(seed=rank)

# %% tags=["nbval-ignore-output"]
torch.manual_seed(0)
model = GPT(shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(60):
    for share in range(4):
        (model(*batches.batch(step, share)) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    together = model(*Batches(corpus(), context=64, size=32).batch(10_000, 0)).item()

same, own = ranks.pull("same_start"), ranks.pull("own_starts")
alone = sum(mine for mine, _ in same) / 4
losses = {
    "four ranks alone (mean of their losses)": alone,
    "their weights averaged at the end, same start": same[0][1],
    "their weights averaged at the end, own starts": own[0][1],
    "one process that reads all the text": together,
}
pd.Series(losses, name="loss").round(2).to_frame()

# %%
print("averaging at the end is as good as training together:", same[0][1] < together + 0.1)
print("averaging models with other starts makes them worse: ", own[0][1] > alone + 0.1)

# %% [markdown]
# The average of four trainings is not one training on four times the text. And with four different starts the average
# is worth less than any of its parts: each network keeps its knowledge in other weights.
#
# ## 2. The idea: average the gradients, in every step
#
# Average the gradients instead, in every step. The loss is a mean over sequences, the gradient of a mean is the mean of
# the gradients, and all shares are of one size, so the mean of the ranks' gradients **is** the gradient of the whole
# batch:
#
# $$ g \;=\; \nabla \frac1N \sum_{r=0}^{N-1} L_r \;=\; \frac1N \sum_{r=0}^{N-1} g_r $$
#
# ($L_r$ is the loss on rank $r$'s share and $g_r$ its gradient. If the shares differ in size, as with padded sentences,
# the mean of means is another number: the exercise `token_mean_loss` mends that.)
#
# If all ranks start with the same weights and apply the same $g$ with the same optimizer, their weights stay the same
# for ever, and nobody has to send weights again. An all-reduce makes $g$. With $\Psi$ parameters of $b$ bytes it costs
# a rank $2 \Psi b (N-1)/N$ bytes a step (chapter 1).
#
# ```mermaid
# flowchart LR
#   subgraph r0 [rank 0]
#     b0[backward on share 0] --> g0[g0]
#   end
#   subgraph r1 [rank 1]
#     b1[backward on share 1] --> g1[g1]
#   end
#   g0 --> a((all-reduce<br/>mean))
#   g1 --> a
#   a --> u0[rank 0: same update]
#   a --> u1[rank 1: same update]
# ```
#
# Two refinements make it fast. **Buckets**: a call has a fixed price, so several gradients travel together.
# **Overlap**: backward makes the last layer's gradient first, so its bucket can travel while the earlier layers still
# compute.

# %% [markdown]
# ## 3. Build it
#
# The ranks begin apart on purpose. Rank 0 sends its weights to the others, once.

# %%
# %%ranks 4
import hashlib


def fingerprints(tensors):
    """How many different sets of bytes the ranks hold."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return len(set(group.all_gather_object(digest.hexdigest())))


model = fresh(seed=rank)
print("different models before:", fingerprints(model.parameters()))
for p in model.parameters():
    group.broadcast(p.data, root=0)
print("different models after: ", fingerprints(model.parameters()))

# %% [markdown]
# **Your turn.** Write the body and run the cell: it is saved in your exercise's file and graded on real ranks in a
# second or two. (The head of `exercises/02_ddp/exercise.py` lists what `group` can do.) A `.grad` that is None counts as
# zero: this rank has not used the parameter, another may have. `%hint 02_ddp average_gradients` helps. Then read on.


# %%
# %%task 02_ddp average_gradients
def average_gradients(group: Group, params: Sequence[nn.Parameter]) -> None:
    """After backward: replace the gradient of each parameter that is not frozen by its mean
    over ranks.

    One all-reduce of one flat buffer, whatever the number of parameters: 2n(N - 1)/N elements
    sent, in the dtype of the gradients, which is one for all. Gradients need not be contiguous.
    No second copy of them may stay.
    """
    raise NotImplementedError("average_gradients")


# %% [markdown]
# **One call a parameter.** After backward, every gradient is replaced by its mean over the ranks. `group.ledger`
# writes down what is called and sent.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "On 4 ranks in fp32, how many bytes a parameter does each rank send in a step?",
    2 * 4 * 3 / 4,
    unit="bytes",
    why="2n(N-1)/N",
)

# %%
# %%ranks
group.ledger.reset()
model(*batches.batch(0, rank)).backward()
print("different gradients before:", fingerprints(p.grad for p in model.parameters()))
for p in model.parameters():
    group.all_reduce(p.grad, "mean")
print("different gradients after: ", fingerprints(p.grad for p in model.parameters()))
naive = [p.grad.clone() for p in model.parameters()]
print(group.ledger.calls(), group.ledger.sent_bytes())

# %% [markdown]
# Is it the gradient of the whole batch? One process reads the four shares one after the other and divides once.
# `Group.all_reduce` adds in rank order, so the comparison may ask for every bit.

# %%
torch.manual_seed(0)
model = GPT(shape)
for share in range(4):
    model(*batches.batch(0, share)).backward()
whole = [p.grad / 4 for p in model.parameters()]
all(
    torch.equal(mine, theirs)
    for mine, theirs in zip(whole, ranks.pull("naive")[0], strict=True)
)

# %% [markdown]
# The broadcast at the start and the average in every step together are all of data parallel training, in a dozen lines.
# (Its usual name is DDP, distributed data parallel.) Call it **rung zero** of the ladder that this course climbs: each
# later stage (a class that trains in one of the ways to come) has the same two methods, and does between them what this
# one does, in less time or in less memory.


# %%
# %%ranks
class Naive:
    def __init__(self, model, optimizer):
        self.params, self.optimizer = list(model.parameters()), optimizer
        for p in self.params:
            group.broadcast(p.data, root=0)

    def backward(self, loss):
        loss.backward()
        for p in self.params:
            group.all_reduce(p.grad, "mean")

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


trained = fresh(seed=rank)
stage = Naive(trained, AdamW(trained.parameters(), lr=3e-3))
for step in range(3):
    stage.backward(trained(*batches.batch(step, rank)))
    stage.step()
print("different models after 3 steps:", fingerprints(trained.parameters()))

# %% [markdown]
# What is wrong with it? 28 calls, each of which costs an $\alpha$; and not one of them begins before backward is over.

# %% [markdown]
# **Buckets.** So let several gradients travel together. Which ones? Those that backward makes one after the other:
# roughly from the last parameter to the first. `%hint 02_ddp assign_buckets` helps.


# %%
# %%task 02_ddp assign_buckets
def assign_buckets(params: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Parameters, less the frozen ones, in buckets, in the order in which backward completes
    them.

    Backward reaches parameters from the last to the first. A bucket holds at most `limit`
    elements, or one parameter that is larger alone. Fill a bucket until the next parameter does
    not fit, then begin another.
    Example: sizes [4, 3, 9, 2], limit 6 -> sizes [[2], [9], [3], [4]]; limit 7 -> [[2], [9],
    [3, 4]].
    """
    raise NotImplementedError("assign_buckets")


# %% [markdown]
# Pack a bucket's gradients end to end, send the bucket, unpack. (`yours` brings your function, once it has passed, and
# until then one that does the same. Packing is a part of the first task; here two functions of torch do it:
# `_flatten_dense_tensors` puts tensors end to end in a new one, `_unflatten_dense_tensors` gives views of its pieces.)

# %%
# %%ranks
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from refimpl.notebook.yours import yours

assign_buckets = yours("02_ddp", "assign_buckets")


def pack(bucket):
    return _flatten_dense_tensors([p.grad for p in bucket])


def unpack(flat, bucket):
    for p, piece in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
        p.grad.copy_(piece)


model.zero_grad()
group.ledger.reset()
model(*batches.batch(0, rank)).backward()
for bucket in assign_buckets(list(model.parameters()), 30_000):
    flat = pack(bucket)
    group.all_reduce(flat, "mean")
    unpack(flat, bucket)
print(
    "same bits as before:", all(map(torch.equal, naive, (p.grad for p in model.parameters())))
)
print(group.ledger.calls(), group.ledger.sent_bytes())

# %% [markdown]
# The same bytes in fewer calls. **Overlap.** A hook is a function that autograd calls. One on each parameter
# (`register_post_accumulate_grad_hook`) runs inside backward, at the moment its gradient is complete. It can start an
# all-reduce and not wait for it. In its bare form, without buckets, every gradient travels alone, and all of them are
# waited for when backward is over:


# %%
# %%ranks
def order(events):
    """On one line: . a gradient is complete, [ an all-reduce starts, ] one has ended."""
    return "".join({"mark": ".", "start": "[", "end": "]"}[event.phase] for event in events)


def leave(p):
    group.ledger.mark("gradient")
    flights.append(group.all_reduce(p.grad, "mean", async_op=True))


model, flights = fresh(), []
for p in model.parameters():
    p.register_post_accumulate_grad_hook(leave)
group.ledger.reset()
model(*batches.batch(0, rank)).backward()
for work in flights:
    work.wait()
print(
    "same bits as before:", all(map(torch.equal, naive, (p.grad for p in model.parameters())))
)
print(order(group.ledger.events))

# %% [markdown]
# Each `[` comes right behind its dot: backward has not stopped for it. But these are 28 calls again. **Your turn: both
# together.** The hook that fills a bucket sends the bucket. Two things make it harder than it sounds: backward does not
# keep to the order of the buckets, and a rank may leave a parameter unused (section 6 shows what the hooks above do
# then). And a step may read its batch in several parts, **micro-batches**, because memory holds no more at once. Their
# gradients add up in `.grad`, and only the last one's backward sends: that is `no_sync`. `%hint 02_ddp Ddp` helps.


# %%
# %%task 02_ddp Ddp
class Ddp:
    """Data parallel around a model: gradients travel in buckets while backward still computes.

        ddp = Ddp(model, group, limit=1000)
        with ddp.no_sync():
            model(first).backward()      # this micro-batch only adds to .grad
        model(last).backward()           # the hooks start one all-reduce a bucket
        ddp.finish()                     # every .grad is the mean over ranks
        optimizer.step()

    Every rank must launch the same buckets in the same order, also if it left some parameters
    unused. Traffic a step: one all-reduce a bucket, in the gradients' dtype, however many
    micro-batches. After finish() no second copy of the gradients stays. Backward runs the hooks
    in the order gradients are complete.
    """

    def __init__(self, model: nn.Module, group: Group, limit: int) -> None:
        """Give all ranks rank 0's parameters and buffers; put a hook on every parameter that is
        not frozen.
        """
        raise NotImplementedError("Ddp.__init__")

    def on_gradient(self, p: nn.Parameter) -> None:
        """Runs inside backward, when p.grad is complete: launch the buckets that are full now,
        in order.
        """
        raise NotImplementedError("Ddp.on_gradient")

    def launch(self) -> None:
        """Start the all-reduce of the next bucket, and do not wait for it."""
        raise NotImplementedError("Ddp.launch")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only add up on this rank: nothing is sent.

        Over with the block, also after an exception.
        """
        raise NotImplementedError("Ddp.no_sync")

    def finish(self) -> None:
        """After backward: launch what never filled, wait for all, put the means into .grad."""
        raise NotImplementedError("Ddp.finish")


# %% tags=["hide-input"]
predict(
    "Which bucket's all-reduce cannot run beside backward?",
    "the last to fill",
    options=["the first to fill", "the last to fill"],
    why="It is full when backward ends.",
)


# %%
# %%ranks
Ddp = yours("02_ddp", "Ddp")
model = fresh()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: group.ledger.mark("gradient"))
ddp = Ddp(model, group, limit=30_000)
group.ledger.reset()
model(*batches.batch(0, rank)).backward()
ddp.finish()
print(
    "same bits as before:", all(map(torch.equal, naive, (p.grad for p in model.parameters())))
)
print(order(group.ledger.events))

# %% [markdown]
# Read the line from left to right. The first `[` stands before most of the dots: that all-reduce was on its way while
# backward still computed. The last bucket never overlaps anything, because it is full only when backward ends.
#
# How much of a bucket travels meanwhile? All of it, though this process computes. On NCCL the GPU runs the whole
# all-reduce on a stream of its own (a queue of work beside the one that computes). On gloo `Group` composes it of two
# transfers with additions between them, and somebody must add: a thread beside the one that computes does
# (`refimpl/comm/behind.py`). The kernel of Linux counts what this rank has written to its sockets (macOS: `nan`):

# %%
# %%ranks
import math
import sys
from pathlib import Path

import torch.distributed as dist

from refimpl.comm.group import Group

tcp, x = Group.world(transport="gloo"), torch.ones(2**20)
bytes_of_all = 2 * x.nbytes * (world_size - 1) / world_size


def written():
    if sys.platform != "linux":
        return math.nan
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


tcp.barrier()
before = written()
work = tcp.all_reduce(x, async_op=True)
while written() - before < bytes_of_all:
    pass  # this rank computes something, for ever so long
dist.barrier()
print(f"before wait: {(written() - before) / bytes_of_all:.1f} of the bytes")
work.wait()
print(f"after wait:  {(written() - before) / bytes_of_all:.1f}")

# %% [markdown]
# ## 4. Read it
#
# `refimpl.zero.ddp` is short, because what it shares with ZeRO lives in `Stage`. Below, `full` is a bucket's flat tensor
# of [P] weights, `local` the gradients that lie in the same order, and a `Reduction` the all-reduce under way, until
# somebody waits for it.

# %%
from refimpl.notebook import show
from refimpl.zero.ddp import DDP
from refimpl.zero.gradients import Gradients

show.source(DDP)

# %% [markdown]
# `Gradients` is `Ddp` grown up: `arrive` is the hook, `launch` sends a bucket.

# %%
show.source(Gradients.arrive, Gradients._launch_full, Gradients.launch)

# %% [markdown]
# What it has in common with the exercise:
#
# - **It launches in one fixed order.** `_launch_full` stops at the first bucket that is not full, even if a later one
#   is. Section 6 shows why.
# - **An unused parameter counts as zero.** Its bucket goes out when backward is over (`launch_rest`).
#
# And what it does besides:
#
# - **At most two buckets travel at a time** (`IN_FLIGHT`), so the memory for receiving stays small.
# - **`p.grad` is emptied at once.** The gradient's home is the bucket; packing costs one copy and no second tensor.
# - **`sync=False` keeps the gradients at home**, as `no_sync` does. With A micro-batches a step, DDP still sends once.
#
# What torch's own `DistributedDataParallel` adds. A **communication hook** is called for each bucket; this
# one only writes down what is in it:


# %%
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from refimpl import run


def torch_ddp(as_view):
    """Buckets of three steps, as (parameters, elements), and the bytes a parameter they take."""
    torch.manual_seed(0)
    model = GPT(shape)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.12, gradient_as_bucket_view=as_view)
    steps, buckets = [], []

    def hook(_, bucket):
        steps[-1].append((len(bucket.parameters()), bucket.buffer().numel()))
        buckets.append(bucket.buffer())
        sent = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return sent.then(lambda done: done.value()[0] / dist.get_world_size())

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        steps.append([])
        buckets.clear()
        ddp(*batches.batch(step, dist.get_rank())).backward()
        alive = [t.untyped_storage() for t in [*buckets, *(p.grad for p in ddp.parameters())]]
        ddp.zero_grad(set_to_none=False)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in alive}  # a storage counts once
    return steps, sum(sizes.values()) / shape.parameters


for as_view in (False, True):
    steps, kept = run(torch_ddp, as_view, ranks=2)[0]
    print(
        f"gradient_as_bucket_view={as_view}: {kept:.0f} bytes a parameter of gradients and buckets"
    )
for number, buckets in enumerate(steps):
    print(
        f"step {number}:",
        ", ".join(f"{elements} elements of {params} tensors" for params, elements in buckets),
    )

# %% [markdown]
# Two more things, on a module with a layer that nobody uses and a batch norm:


# %%
class Spare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.used(x))


def running_means(ddp):
    """How many different ones the ranks have."""
    means = [None] * dist.get_world_size()
    dist.all_gather_object(means, ddp.module.norm.running_mean.tolist())
    return len(set(map(tuple, means)))


def two_steps(find):
    """Whether the second step comes; then the running means, and again after one more forward."""
    ddp = DistributedDataParallel(Spare(), find_unused_parameters=find)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    try:
        for _ in range(2):
            ddp(x).square().sum().backward()
    except RuntimeError as error:
        return str(error).partition(".")[0]
    before = running_means(ddp)
    ddp.eval()(x)
    return f"trains; {before} different running means, a forward later {running_means(ddp)}"


for find in (False, True):
    print(f"find_unused_parameters={find}: {run(two_steps, find, ranks=2)[0]}")

# %% [markdown]
# - **Buckets are rebuilt.** In the first step all lies in one bucket, because torch does not know yet in which order
#   gradients come. It writes the order down and deals new buckets before the second forward. (refimpl guesses, last
#   parameter first, and keeps to it.)
# - **`gradient_as_bucket_view`** makes `p.grad` a view of its bucket and saves 4 bytes a parameter. It is off by
#   default, because code that does `p.grad.detach_()` or keeps gradients for later would meet the bucket. refimpl's
#   gradients live in the buckets always.
# - **`find_unused_parameters`** walks the graph after each forward and counts what it does not find as ready. Off by
#   default, for the walk costs time; then an unused parameter is an error at the next forward. With it buckets are not
#   rebuilt. `static_graph=True` says that every step uses the same parameters, and walks once.
# - **Buffers** (the running means of a batch norm) each rank changes by itself in forward; before the next one rank 0's
#   are sent to all (`broadcast_buffers`, of late `forward_sync_buffers`). refimpl does the same.

# %% [markdown]
# ## 5. Measure it
#
# The second step of `refimpl.DDP` with AdamW on 2, 3 and 4 ranks (AdamW makes its state in the first). `twin.measure`
# trains a GPT on that many ranks: `MemoryMeter` adds up the storages that are alive between backward and update, the
# ledger adds up bytes. `refimpl.plan.formulas` predicts both from the layout. All chapters from here on measure so.

# %%
from refimpl.notebook import twin
from refimpl.plan.formulas import memory_bytes, traffic

rows = []
for n in (2, 3, 4):
    ddp = twin.measure("ddp", shape, ranks=n, dtype=torch.float32, reduce_bucket_size=30_000)
    layout, expected = ddp.layout, traffic("ddp", n, 4, ddp.layout)[0]
    calls, counted = ddp.calls_for["gradients"], ddp.sent_for["gradients"]
    rows.append([n, layout.numel, layout.padding, calls, expected.bytes, counted])
sent = pd.DataFrame(
    rows, columns=["ranks", "parameters", "padding", "calls", "formula", "counted"]
)
sent["equal"] = sent.formula == sent.counted
sent["bytes a parameter"] = (sent.counted / sent.parameters).round(2)
sent

# %% [markdown]
# $2 \Psi b (N-1)/N$ with $b = 4$: 4 bytes a parameter on 2 ranks, 5.33 on 3, 6 on 4, and never 8. On top comes the
# padding, the few elements that round each bucket up to a multiple of $64 N$. (One more all-reduce a step, of 8 bytes a
# parameter tensor and a few more, says which parameters no rank has used: torch's optimizers leave those alone, so a
# stage must too. The table leaves it out.)
#
# Memory, on 4 ranks (in fp32 there are no master weights; chapter 3 says what they are):

# %%
expected = memory_bytes("ddp", 4, 4, layout)
memory = show.compare(formula=expected, counted={name: ddp.kept[name] for name in expected})
memory["bytes a parameter"] = (memory.counted / layout.numel).round(2)
memory

# %%
receive = ddp.kept["buckets"]
print(
    "beside these, kept by the transport:",
    receive > 0,
    "| at most two buckets long:",
    receive <= 2 * 4 * 30_000,
)

# %% [markdown]
# One thing is not in the formula: what the transport keeps. Over a network these are the buffers in which the others'
# gradients arrive, a bucket or two, however large the model is. Ranks of one host read each other's buckets where they
# lie, and keep only copies of a few small messages. The rest is 16 bytes a parameter (the hundredths are padding), on
# every rank, for any $N$. That is DDP's limit: more ranks read more text, but no rank can hold a larger model. Nothing
# in the `formula` column divides by $N$. Chapters 4 to 6 make it do so.
#
# Now the clock. The plot shows rank 0's ledger of the fastest of ten steps on 2 ranks, with `overlap_comm` off and on.
# A tick is a gradient, a bar an all-reduce from its start until its result was waited for, and its number says which
# bucket's.

# %% tags=["nbval-ignore-output", "hide-input"]
import matplotlib.pyplot as plt


def timed(overlap, steps=10):
    """On every rank: the clock, and the events of the fastest step."""
    wide = GPTConfig(context=64, width=128, layers=4, heads=4)
    stage = twin.start("ddp", wide, reduce_bucket_size=150_000, overlap_comm=overlap)
    clock, ledger = Clock(warmup=1), stage.group.ledger
    for step in range(steps):
        ledger.reset()
        with clock.time():
            stage.backward(stage.model(*batches.batch(step, stage.group.rank)))
            stage.step()
        if clock.ms["step"][-1] == min(clock.ms["step"]):
            fastest = list(ledger.events)
    return clock, fastest


def draw_step(axis, events):
    begin = events[0].time_ns
    ms = [(event.time_ns - begin) / 1e6 for event in events]
    ends = {
        event.call: time for event, time in zip(events, ms, strict=True) if event.phase == "end"
    }
    first = min(ends)
    for event, time in zip(events, ms, strict=True):
        if event.phase == "mark":
            axis.plot([time, time], [-0.3, 0.3], color="black", linewidth=0.8)
            last = time
        elif event.phase == "start":
            lane = 1 + (event.call - first) % 2
            axis.barh(
                lane,
                ends[event.call] - time,
                left=time,
                height=0.8,
                color="tab:orange",
                edgecolor="white",
            )
            axis.text(time, lane, f" {event.call - first}", va="center", fontsize=9)
    axis.axvline(last, color="tab:blue", linestyle="--", linewidth=1)
    axis.text(
        last, 2.9, "the last gradient ", color="tab:blue", ha="right", va="top", fontsize=9
    )
    axis.set(
        yticks=[0, 1.5], yticklabels=["gradients", "all-reduce\nof bucket"], ylim=(-0.5, 3)
    )


figure, axes = show.figure(4.4, rows=2, sharex=True)
for axis, overlap in zip(axes, (False, True), strict=True):
    clock, fastest = run(timed, overlap, ranks=2)[0]
    draw_step(axis, fastest)
    axis.set_title(
        f"overlap_comm={overlap}, median step {clock.median():.0f} ms", loc="left", fontsize=10
    )
axes[1].set_xlabel("ms since the first gradient")
plt.show()

# %% [markdown]
# With overlap, most bars begin left of the line. The same fact without a clock, from the order of the events:

# %%
for overlap in (False, True):
    ddp = twin.measure("ddp", shape, ranks=4, reduce_bucket_size=30_000, overlap_comm=overlap)
    signs = [
        {"mark": ".", "start": "[", "end": "]"}[e.phase] for e in ddp.events if e.tag != "norm"
    ]
    print(f"overlap_comm={overlap!s:6}", "".join(signs))

# %% [markdown]
# At most two brackets are open at a time: `IN_FLIGHT`. Now compare the medians above the plots. On CPU ranks overlap
# wins little or nothing, and may even cost: the ranks share the cores, and those same cores move the bytes. On GPUs it
# wins much and still is not free. NCCL's copies and additions are kernels, programs that the GPU runs: they take some
# of the GPU's multiprocessors (SMs) and of its memory bandwidth away from the products that run beside them, which
# become slower meanwhile. (Since 2.28 NCCL can leave what only copies, such as an all-gather, to the GPU's copy engines,
# within one NVLink domain. Who adds needs a kernel.)
#
# **How large should a bucket be?** Many small ones pay the price of a call too often. Few large ones leave little to
# overlap: the last one travels alone. Turn the knobs: backward takes 100 ms, the gradients of a model of 350 million
# parameters in 16 bits travel on a ring. The curve is the time that communication adds to backward
# (`refimpl.plan.time.exposed_seconds`).

# %% tags=["hide-input"]
from refimpl.notebook.widgets import Knobs
from refimpl.plan.time import Link, exposed_seconds, ring_all_reduce_seconds

MODEL, BACKWARD = 350e6 * 2, 0.1  # bytes, seconds
COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def exposed(buckets, ranks, gigabytes_a_second, microseconds_a_message):
    link = Link(alpha=microseconds_a_message * 1e-6, bandwidth=gigabytes_a_second * 1e9)
    travel = buckets * ring_all_reduce_seconds(MODEL / buckets, ranks, link)
    return 1e3 * exposed_seconds(BACKWARD, travel, buckets)


def draw(**knobs):
    figure, axis = show.figure(2.8)
    axis.plot(COUNTS, [exposed(n, **knobs) for n in COUNTS], marker="o")
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="buckets",
        ylabel="ms added to backward",
        ylim=(0.1, 10_000),
    )
    axis.set_xticks(COUNTS, COUNTS)
    axis.minorticks_off()
    return figure


table = pd.DataFrame(
    {"buckets": COUNTS, "MB a bucket": [round(MODEL / n / 1e6, 1) for n in COUNTS]}
)
for n in (4, 64, 512):
    table[f"ms added, {n} ranks"] = [round(exposed(b, n, 50, 10), 1) for b in COUNTS]
Knobs(
    draw,
    table,
    ranks=[4, 64, 512],
    gigabytes_a_second=[50, 25, 12, 100, 400],
    microseconds_a_message=[10, 1, 50],
)

# %% [markdown]
# On 64 ranks the best bucket has 22 MB, close to the 25 MB that torch's DDP takes by default. On 512 ranks it has 175
# MB, and even so 17 ms remain, because a ring pays $2(N-1)$ messages for each bucket. The default of Megatron-LM,
# NVIDIA's library for large models, grows with the ranks for that reason, max(40, $N$) million parameters a bucket. And
# at that size libraries leave the ring for trees, or for rings of rings.

# %% [markdown]
# ## 6. Break it: sum for mean, no common start, an unused parameter
#
# **Sum for mean.** An all-reduce sums by default, and $N$ times the gradient looks like a gradient. Which optimizer
# notices?

# %% tags=["hide-input"]
predict(
    "Gradients are summed over 4 ranks where they should be averaged. Whose loss shows it?",
    "SGD's",
    options=["SGD's", "AdamW's", "both"],
    why="AdamW divides by the gradient's own size, so a constant factor cancels.",
)

# %%
# %%ranks 4
from torch.optim import SGD


def average(model, op):
    """Reduce all gradients in one call; the norm of the result."""
    everything = list(model.parameters())
    flat = pack(everything)
    group.all_reduce(flat, op)
    unpack(flat, everything)
    return flat.norm().item()


def train(model, optimizer, op="mean", steps=16):
    norms, losses = [], []
    for step in range(steps):
        loss = model(*batches.batch(step, rank))
        loss.backward()
        norms.append(average(model, op))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return norms, losses


makes = {
    "AdamW, lr 0.003": lambda p: AdamW(p, lr=0.003),
    "SGD, lr 0.5": lambda p: SGD(p, lr=0.5),
}
runs = {}
for name, make in makes.items():
    for op in ("mean", "sum"):
        model = fresh()
        runs[name, op] = train(model, make(model.parameters()), op)
adam, _ = makes
print(
    "norm of the first gradient, summed / averaged:",
    f"{runs[adam, 'sum'][0][0] / runs[adam, 'mean'][0][0]:.3f}",
)

# %% tags=["nbval-ignore-output", "hide-input"]
last = pd.Series(
    {key: losses[-1] for key, (_, losses) in ranks.pull("runs")[0].items()}
).unstack()
last.round(2).rename_axis("loss of rank 0 after 16 steps")

# %% [markdown]
# AdamW divides the gradient by its own size, so a constant factor cancels and the loss curve looks healthy. SGD takes
# steps that are four times too large, and diverges. Under AdamW the bug sleeps until somebody turns on gradient
# clipping (a gradient whose norm is above a limit is shortened to it), or goes on from a checkpoint with another number
# of ranks. So do not look at the loss: compare the norm of the gradient with that of one process on the same batch. A
# ratio of exactly $N$ names the bug.
#
# **The forgotten broadcast.** Every rank starts with its own weights and all apply the same updates. Nothing hangs and
# every loss falls, yet there are four models, and only rank 0's will be saved.

# %%
# %%ranks
for share_the_start in (True, False):
    model = fresh(seed=rank)
    if share_the_start:
        for p in model.parameters():
            group.broadcast(p.data)
    _, losses = train(model, AdamW(model.parameters(), lr=0.003))
    print(f"broadcast {share_the_start}: the loss fell: {losses[-1] < losses[0]}")
    print("    different models:", fingerprints(model.parameters()))

# %% [markdown]
# `fingerprints` finds it: compare a hash of the weights over the ranks, at the start and every thousand steps. It costs
# each rank one small message to each of the others: a pickled string of 79 bytes.
#
# **A parameter that one rank does not use.** A model drops layers at random, and each rank draws for itself. The hooks
# below send every gradient as it comes. Rank 1 has no gradient for the middle layer, so it makes one call less.

# %% tags=["hide-input"]
predict(
    "One rank leaves a layer unused and sends one gradient less. What do the others do?",
    "wait for ever",
    options=["raise an error", "wait for ever", "take the mean of three"],
)

# %% tags=["raises-exception"]
# %%ranks
from torch import nn

layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))


def forward(x):
    for i, layer in enumerate(layers):
        if (rank, i) != (1, 1):
            x = layer(x)
    return x.square().mean()


def send(p):
    group.all_reduce(p.grad, "mean")
    print("averaged a gradient")


for layer in layers:
    layer.weight.register_post_accumulate_grad_hook(send)
forward(torch.ones(4, 8)).backward()

# %% [markdown]
# The report says who waits where, and that rank 1 has finished. That is the pattern to look for: **the rank that does
# not wait is the one that took another path.** There is worse above the report. Rank 1 too had two answers, and the
# second was wrong: it sent the gradient of layer 0 while the others sent that of layer 1. The shapes are equal, so the
# mean was made. Had rank 1 made one call more, for anything of that size, nobody would have noticed. Collectives carry
# no names. They match by their order alone.
#
# `refimpl` launches buckets in one order on every rank and sends zeros for what a rank did not use:

# %%
# %%ranks 4
from torch import nn

from refimpl import DDP, ZeroConfig

torch.manual_seed(0)
layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))


def forward(x):
    for i, layer in enumerate(layers):
        if (rank, i) != (1, 1):
            x = layer(x)
    return x.square().mean()


ddp = DDP(
    layers,
    torch.optim.SGD(layers.parameters(), lr=0.1),
    group,
    ZeroConfig(reduce_bucket_size=64),
)
group.ledger.reset()
ddp.backward(forward(torch.ones(4, 8)))
print(group.ledger.calls(), "stepped:", ddp.step())
print([event.op for event in group.ledger.events if event.phase == "mark"])

# %% [markdown]
# ## 7. Prove it
#
# Five steps of `refimpl.DDP`, whose ranks begin with other weights each, against its **twin**: one process of plain torch
# that reads all ranks' micro-batches, adds their gradients in rank order, divides once, and calls the same AdamW.
# (`ranks_first` is for chapter 5, where a step has several micro-batches.) Every weight, every bit, on 2, 3 and 4 ranks.
# (29 names for 28 tensors: the embedding is the output layer too.)

# %%
show.source(twin._one_process)

# %%
for n in (2, 3, 4):
    mine = twin.measure("ddp", shape, ranks=n, dtype=torch.float32, steps=5).weights
    theirs = twin.one_process(shape, ranks=n, steps=5)
    same = sum(torch.equal(mine[name], theirs[name]) for name in theirs)
    print(f"{n} ranks: {same} of {len(theirs)} tensors equal")

# %% [markdown]
# - **Exercises:** [exercises/02_ddp](../exercises/02_ddp): average gradients, weigh shares of different size, deal
#   buckets, build DDP by hooks with overlap, and `no_sync`.
# - **Quiz:** `refimpl quiz --topic communication`, or `Quiz("communication")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/zero/test_stages.py](../tests/zero/test_stages.py) asks all of
#   this at 2, 3 and 4 ranks, with tied, frozen, unused and oddly sized parameters.
# - **Code:** [refimpl/zero/ddp.py](../refimpl/zero/ddp.py), [refimpl/zero/gradients.py](../refimpl/zero/gradients.py).
# - **DeepSpeed:** `deepspeed/runtime/engine.py`, `allreduce_gradients` (its stage 0). In PyTorch:
#   `torch/csrc/distributed/c10d/reducer.cpp`.
# - **Paper:** Li et al. 2020, "PyTorch Distributed", [arXiv:2006.15704](https://arxiv.org/abs/2006.15704), section 3.2
#   (buckets, overlap, unused parameters) and section 5 (how large a bucket should be).
#
# Next: 16 bytes a parameter. [Chapter 3](03_precision_and_bytes.ipynb) asks where they go.
