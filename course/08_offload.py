# %% [markdown]
# # 8 · Offload: state that rests elsewhere
#
# ZeRO divides the model's state by the number of ranks, checkpointing makes activations small. What is left must fit
# the memory of the **device**, the GPU, and that is the smallest and dearest memory of the machine. Around it is the
# **host**, the machine's own cores and their memory, with several times as much, and a disk with a hundred times as
# much. This chapter moves optimizer state there, counts what that costs each step, and overlaps what can be overlapped.
# You need chapters 03 (master weights), 04 and 05.

# %% [markdown]
# ## 1. The pain: the size of the device
#
# Training in bf16 with AdamW takes 16 bytes a parameter: 2 for the weight, 2 for its gradient, and 12 in fp32 for the
# master weight and AdamW's two moments, as its running means are also called. Take devices of 80 GB, in a host with 512
# GB of memory and an 8 TB disk:

# %%
# %load_ext refimpl.notebook

# %%
import pandas as pd

from refimpl.plan.formulas import Layout, memory_bytes

DEVICE = 80e9  # bytes
ROOM = {"in the host's memory": 512e9, "on the disk": 8e12}
one = memory_bytes("ddp", 1, 2, Layout(1000, padding=0, buckets=0))
state = (one["optimizer"] + one["master weights"]) / 1000  # 12 bytes a parameter
rest = sum(one.values()) / 1000 - state  # 4


def largest(devices):
    """How many parameters fit, by where the 12 bytes rest; the other 4 are sharded."""
    on_device = devices * DEVICE / (state + rest)
    elsewhere = {
        home: min(devices * DEVICE / rest, size / state) for home, size in ROOM.items()
    }
    return {"on the devices": on_device, **elsewhere}


table = pd.DataFrame({f"{n} device(s)": largest(n) for n in (1, 8)}) / 1e9
table.rename_axis("the 12 bytes rest").map("{:.0f} B".format)

# %% [markdown]
# With one device the next wall is the device again: the 4 bytes that stay. With eight devices in that host, which share
# its memory, it is the host's memory. Only the disk lets all of them be filled with weights and gradients. (Parameters
# can go to the disk too. That is chapter 09.)

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "A step of 4 micro-batches. What should leave the device first?",
    "optimizer state",
    options=["optimizer state", "gradients", "weights"],
    why="12 of 16 bytes, touched once a step. A gradient is written for each micro-batch, a weight read twice for each.",
)

# %% [markdown]
# ## 2. The idea: compute where the state is
#
# AdamW reads and writes 28 bytes a parameter and does a dozen operations with them: it is all memory, hardly any
# compute. A GPU's memory would be 30 times as fast as the host's (some 3,000 GB/s beside 100), but what rests at the
# host would first have to come over the link, which is slower than both. So do not bring the state to the device. Leave
# it at the host, send the gradient there, let the host's cores update, and send the new weight back. This is
# **ZeRO-Offload** (Ren et al. 2021). If the state rests on a disk, it passes through a few buffers of the host's memory
# on its way, **ZeRO-Infinity** (Rajbhandari et al. 2021).
#
# ```mermaid
# flowchart LR
#   D["device<br/>weights, gradients"] -->|"gradient, 2 bytes"| H["host<br/>AdamW on its cores"]
#   H -->|"weight, 2 bytes"| D
#   S["disk<br/>masters, moments"] -->|"12 bytes"| H
#   H -->|"12 bytes"| S
# ```
#
# (4 in place of 2 where the model is in fp32.) Each of $N$ ranks does that for its own $\Psi/N$ parameters, through a
# link of its own. Is the link fast enough? Forward and backward take 6 operations a parameter and token. With $T$
# tokens a rank and step, $b$ bytes a parameter over a link of $B$ bytes a second, and a device of $F$ operations a
# second:
#
# $$\frac{\text{link}}{\text{compute}} = \frac{b\,\Psi / (N B)}{6\,\Psi\,T / F} = \frac{b\,F}{6\,N\,B} \cdot \frac1T$$
#
# At $T = bF/6NB$ tokens the link takes as long as forward and backward; with ten times as many, a tenth of that.
# $6NT/b$ is the **arithmetic intensity**, operations for each byte that moves. A larger batch raises it, and more
# micro-batches a step do, since the state moves once a step.

# %% tags=["hide-input"]
predict(
    "A model with twice the parameters, the same devices, the same tokens. What becomes of the share of a step that its "
    "link takes?",
    "it stays",
    options=["it doubles", "it stays", "it halves"],
    why="Psi stands on both sides: twice the bytes, and twice the operations.",
)

# %% [markdown]
# In numbers of today, for a device that computes 150 TFLOP/s: the tokens $T$ of a rank and step at which each of four
# things takes as long as forward and backward.

# %%
F = 150e12  # operations a second
links = {  # bytes a parameter, bytes a second, ranks that share it
    "link to the host, 25 GB/s each way": (2, 25e9, 1),
    "AdamW in the host's memory, 100 GB/s, shared by 8": (28, 100e9, 8),
    "disk of each rank, 3 GB/s": (24, 3e9, 1),
    "one disk for 8 ranks, 3 GB/s": (24, 3e9, 8),
}
rows = {
    name: [f"{b * F * shared / (6 * N * B):,.0f}" for N in (8, 64)]
    for name, (b, B, shared) in links.items()
}
pd.DataFrame.from_dict(rows, orient="index", columns=["8 ranks", "64 ranks"]).rename_axis(
    "tokens a rank and step"
)

# %% [markdown]
# The PCIe link, which everybody names first, is the least of the four, even if weights go down only when all gradients
# are up: then its 250 tokens are 500. The host's own memory is slower than it looks, because eight ranks share it. A
# disk wants large batches: accumulate.
#
# What overlaps with what? Gradients leave while backward still runs, so their way up the link hides. The update does
# not: the norm to clip by is known with the last gradient, and the next forward needs the update's result. What the
# host's memory and the disk take for it is added to the step. They can overlap with each other (section 3), and only
# more tokens make their share small. Or one lets the update be late, at a price (section 5).

# %% [markdown]
# ## 3. Build it
#
# **The host.** Here is all of it in one process. No GPU is needed: `Link` only copies and counts.


# %%
from collections import Counter

import torch

torch.set_num_threads(1)


class Link:
    """From device to host and back: what crosses it is copied and counted."""

    def __init__(self):
        self.bytes = Counter()

    def send(self, tensor, way):
        self.bytes[way] += tensor.nbytes
        return tensor.detach().clone()


class OnHost:
    """AdamW whose masters and moments are at the host."""

    def __init__(self, params, link):
        self.params, self.link = list(params), link
        self.masters = [link.send(p, "first").float() for p in self.params]
        self.adamw = torch.optim.AdamW(self.masters, lr=1e-3)

    def step(self):
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = self.link.send(p.grad, "up").float()
            p.grad = None
        self.adamw.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data.copy_(self.link.send(master.to(p.dtype), "down"))


# %%
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.notebook import show

shape = GPTConfig(context=32, width=64, layers=2, heads=2)
batches = Batches(corpus(), context=32, size=8)
Psi = shape.parameters


def three_steps(make, dtype=torch.float32):
    """The weights after three steps with the optimizer that `make` makes."""
    torch.manual_seed(0)
    model = GPT(shape).to(dtype)
    optimizer = make(list(model.parameters()))
    for step in range(3):
        model(*batches.batch(step, 0)).backward()
        optimizer.step()
        model.zero_grad()
    return list(model.parameters())


link = Link()
plain = three_steps(lambda params: torch.optim.AdamW(params, lr=1e-3))
found = three_steps(lambda params: OnHost(params, link))
print("fp32, equal bits:", all(map(torch.equal, found, plain)))
counted = {"fp32 up": link.bytes["up"], "fp32 down": link.bytes["down"]}
link = Link()
three_steps(lambda params: OnHost(params, link), torch.bfloat16)
counted |= {"bf16 up": link.bytes["up"], "bf16 down": link.bytes["down"]}
formula = {
    f"{name} {way}": 3 * b * Psi
    for name, b in (("fp32", 4), ("bf16", 2))
    for way in ("up", "down")
}
show.compare(formula, counted)

# %% [markdown]
# On a real device the gradients of a bucket leave while backward makes the next, and updated weights return while the
# host updates the next bucket. The copies need **pinned** memory, pages that the kernel promises not to move: only from
# there can a GPU copy while it computes.
#
# **The disk.** A file is usually read through the *page cache*: the kernel keeps a copy of every page in its own
# memory, in case somebody asks again. Nobody will before the next step, and that memory was to be saved. `O_DIRECT`
# opens a file past the cache: the disk itself copies from and to the program's memory. It cannot copy just any bytes:

# %% tags=["nbval-ignore-output"]
import errno
import os
import tempfile
from pathlib import Path

from refimpl.offload.blocks import PAGE, BlockFile, Buffer

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
file = BlockFile(folder)
file.record(4 * PAGE)
memory = Buffer(4 * PAGE).view  # begins on a page
for what, offset, part in (
    ("one page", 0, memory[:PAGE]),
    ("from byte 100 of the file on", 100, memory[:PAGE]),
    ("1000 bytes", 0, memory[:1000]),
    ("memory that begins 16 bytes behind a page", 0, memory[16 : 16 + PAGE]),
):
    try:
        print(f"{what}: {os.pwritev(file.descriptor, [part], offset)} bytes written")
    except OSError as error:
        print(f"{what}: {errno.errorcode[error.errno]}")
print("O_DIRECT:", file.direct, "| names in the folder:", list(folder.iterdir()))

# %% [markdown]
# Offset, length and address must be multiples of the disk's block: of 4096, to be safe everywhere. (Linux from 6.0 on
# asks less of the address on some disks: the fourth line is written there. Where a file system has no `O_DIRECT`, all
# four are, and refimpl warns.) The last line is worth a thought. The file has no name (`O_TMPFILE`): when the process
# ends, by SIGKILL (`kill -9`) too, the kernel gives its space back, and two jobs in one folder never meet.
#
# **Your turn.** What does it take to write bytes that begin anywhere? `LateDisk` is a file that insists on alignment on
# every machine, and does everything as late as it may; `%hint 08_offload write_bytes` helps.

# %%
from collections.abc import Iterator, Sequence

from torch import Tensor

from refimpl.grading.drive import PAGE, LateDisk


# %%
# %%task 08_offload write_bytes
def write_bytes(disk: LateDisk, start: int, data: Tensor) -> None:
    """data, uint8 [n], n > 0, to the bytes of the file from `start` on, by transfers of whole
    pages; done at return.

    What stands beside it in its first and its last page keeps its values. For that a page is
    read which data covers in part, and no other; the pages that data touches, and no others,
    are written in one transfer. data keeps its values.
    Example: 5000 bytes from 4000 on touch pages 0 to 2; pages 0 and 2 are read, all three are
    written.
    """
    raise NotImplementedError("write_bytes")


# %% [markdown]
# Reading before writing is what offloading avoids: a **record** of refimpl holds weights, first and second moments of
# some elements one behind the other, is padded to whole pages, and always moves whole.
#
# **Parts.** The state on the disk is larger than memory, so it comes in parts: read one, update it, write it back. One
# after the other, either the disk works or the cores do. With more buffers they overlap.

# %% tags=["hide-input"]
predict(
    "Reading a part takes 3 ms, its update 1 ms, writing it 3 ms; the disk reads and writes at once. Milliseconds a part "
    "in the long run, with three buffers?",
    max(3, 1, 3),
    unit="ms",
    why="The slowest of the three. With one buffer it is their sum, 7.",
)

# %% [markdown]
# Watch it in a real run: ZeRO-2 on a model of 3 million parameters, its state in 13 records on the disk. `Timed` notes
# when each transfer began, and when its last block arrived:


# %%
import time

from refimpl.offload.homes import Disk


class Timed(Disk):
    """Notes bars [what, part, buffer, begin, end] of the last round."""

    def __init__(self, *args):
        self.bars = []
        super().__init__(*args)

    def note(self, what, part, buffer, transfer):
        bar = [what, part.start, self.buffers.index(buffer), time.perf_counter(), 0.0]
        way = transfer(part, buffer)
        for block, _ in way.blocks:
            block.add_done_callback(lambda _: bar.__setitem__(4, time.perf_counter()))
        self.bars.append(bar)
        return way

    def _read(self, part, buffer):
        return self.note("read", part, buffer, super()._read)

    def _write(self, part, buffer):
        return self.note("write", part, buffer, super()._write)

    def rounds(self, parts, back=True):
        self.bars = []
        for k, part in enumerate(super().rounds(parts, back)):
            begun = time.perf_counter()
            yield part
            update = ["update", part.start, k % self.buffer_count, begun, time.perf_counter()]
            self.bars.append(update)


# %%
from refimpl import launch
from refimpl.comm.group import Group
from refimpl.zero.config import ZeroConfig
from refimpl.zero.zero2 import Zero2


def bars(buffer_count):
    """On a rank: the quickest update of eight."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=32, width=256, layers=4, heads=4))
    disk = Timed(folder, buffer_count)
    config = ZeroConfig(optimizer_home=disk, sub_group_size=1 << 18, reduce_bucket_size=10**9)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stage = Zero2(model, adamw, Group.world(), config)
    rounds = []
    for step in range(8):
        stage.backward(model(*batches.batch(step, 0)))
        stage.step()
        rounds.append(disk.bars)
    return min(rounds, key=lambda bars: max(bar[4] for bar in bars) - bars[0][3])


seen = {n: launch.run(bars, n, ranks=1)[0] for n in (1, 3)}
for n, found in seen.items():
    order = sorted(found, key=lambda bar: bar[3])
    print(n, "buffer(s):", *(f"{bar[0][0]}{bar[1] >> 18}" for bar in order[:16]), "...")

# %% [markdown]
# Those are the beginnings, in order: r3 is the begin of part 3's read, u3 of its update, w3 of its write. With three
# buffers, at u1 the read of part 2 has begun and nobody has waited for it, and so has the write of part 0. That is
# overlap by the order of events, which no clock can spoil. And the clock's picture, one row a buffer:

# %% tags=["nbval-ignore-output", "hide-input"]
import matplotlib.pyplot as plt

COLOURS = {"read": "#2a6f97", "update": "#e09f3e", "write": "#c1666b"}
figure, axes = show.figure(3.4, rows=2, sharex=True, height_ratios=[1, 2.4])
for axis, (n, found) in zip(axes, seen.items(), strict=True):
    zero = min(bar[3] for bar in found)
    for what, start, buffer, begun, ended in found:
        axis.barh(
            -buffer,
            1e3 * (ended - begun),
            left=1e3 * (begun - zero),
            color=COLOURS[what],
            edgecolor="white",
            height=0.8,
        )
        if what == "update":
            middle = 1e3 * ((begun + ended) / 2 - zero)
            axis.text(middle, -buffer + 0.44, start >> 18, ha="center", fontsize=9)
    axis.set(
        yticks=range(0, -n, -1),
        yticklabels=range(n),
        ylim=(0.8 - n, 0.8),
        ylabel="buffer",
        title=f"{n} buffer{'s' if n > 1 else ''}: {1e3 * max(bar[4] - zero for bar in found):.0f} ms",
    )
    axis.title.set_fontsize(9)
axes[1].set_xlabel("milliseconds")
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
figure.legend(handles, COLOURS, ncols=3, frameon=False, loc="outside upper center")
plt.show()
# %% [markdown]
# With one buffer blue, yellow and red take turns. With three, an update (its part's number above it) has a read and a
# write under way in the rows beside it. A bar begins when the transfer is asked for, and part of it is waiting for the
# disk: so bars are longer below. How much shorter the whole becomes depends on the machine. It is much where disk and
# cores are both slow. It is little where the disk reads and writes at once hardly faster than in turn (section 5), or
# where two cores have to copy and to update. The order does not vary. `Disk` takes four by default, so that both of the
# disk's queues stay full while a part is updated. More would only cost memory: each is as large as the largest part,
# whatever the size of the model.
#
# **Your turn.** The first half of that pipeline is a reader that keeps one read ahead.


# %%
# %%task 08_offload read_ahead
def read_ahead(disk: LateDisk, places: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """A generator: each place's bytes in turn, uint8 [nbytes], while the next place is being
    read.

    places: (offset, nbytes), whole pages; maybe none. When the bytes of one are handed out, the
    read of the next has begun, and nobody has waited for it. They stay as they are until the
    caller asks for more. Two buffers, each as large as the largest place, whatever there is to
    read. However it ends (a caller that stops early closes the generator; a disk fails), no
    transfer is left under way.
    """
    raise NotImplementedError("read_ahead")


# %% [markdown]
# ## 4. Read it
#
# A stage is handed the **home** of its optimizer state; no home means the device. `Disk` is `Host` with a file: its
# `rounds` hands out one part after the other while it is in memory.

# %%
from refimpl.offload.homes import Host

show.source(Host.rounds, Disk.rounds)

# %% [markdown]
# `pipelined` ([pipeline.py](../refimpl/offload/pipeline.py), 40 lines, and your exercise `update_parts`) decides what
# is under way. What is left of an update is a loop over parts:

# %%
from refimpl.zero.offload.offloaded import OffloadedUpdate

show.source(OffloadedUpdate.update_parts, OffloadedUpdate.round)

# %% [markdown]
# `hand_out` gives the part's elements their gradient, `step_inside` runs the user's own torch optimizer on them: AdamW
# treats every element by itself, so a model updated in parts gets the same bits. An optimizer that looks at a whole
# parameter (LAMB's trust ratio, Muon's orthogonalised matrix) cannot be cut like that: all its parts are updated at once
# in the host's memory ([offloaded_whole.py](../refimpl/zero/offload/offloaded_whole.py)), and with a disk it is refused.
#
# And what does offload add to a *stage*? These are all the lines of the four stages, and of what they have in common,
# that know of it, docstrings aside:

# %%
import re

from refimpl.zero import chosen, ddp, stage, zero1, zero2, zero3
from refimpl.zero.loop import hooked

KNOWS = re.compile(r"offload|_home\b|shelf|delayed|catch_up", re.IGNORECASE)
for module in (ddp, zero1, zero2, zero3, stage, hooked, chosen):
    lines = show.code(module, docstrings=False).splitlines()
    know = [line for line in lines if KNOWS.search(line.split("#")[0])]
    print(f"{Path(module.__file__).name}: {len(know)} of {len(lines)} lines")
    for line in know:
        print("    ", line.strip()[:86])

# %% [markdown]
# In DeepSpeed's JSON a home is a section. Its word for a disk is `nvme` (NVMe: solid-state disks on the PCIe bus), and
# any folder will do. This file asks for the disk, and this is what its keys become:

# %%
from refimpl.engine.config import load_config
from refimpl.engine.homes import with_homes

settings = load_config(
    {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 2,
            "sub_group_size": 1_000_000,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(folder),
                "buffer_count": 4,
                "pipeline_read": True,
                "pipeline_write": True,
                "ratio": 0.5,
            },
        },
        "aio": {"block_size": 262_144, "queue_depth": 16},
    },
    world_size=1,
)
zero = with_homes(settings.zero_config(), settings, torch.device("cpu"), Group(None))
home = zero.optimizer_home
pd.DataFrame(
    {
        "device, nvme_path": [type(home).__name__, "where the 12 bytes rest: none, cpu, nvme"],
        "sub_group_size": [zero.sub_group_size, "elements of a part"],
        "buffer_count, pipeline_*": [home.buffer_count, "parts in memory at once"],
        "device, in stage 2 and 3": [
            "same disk" if zero.gradient_home is home else "",
            "where shards of gradients wait for the step",
        ],
        "ratio": [zero.offload_ratio, "share of the elements that leaves the device"],
        "aio.block_size": [home.file.block, "bytes of one request"],
        "aio.queue_depth": [home.file.aio.queue_depth, "requests under way at once"],
    },
    index=["here", "meaning"],
).T

# %% [markdown]
# Without `pipeline_read` and `pipeline_write` one buffer does all in turn, with either two. Both are off by default, as
# in DeepSpeed: the first thing to look at when a disk seems slow. A buffer is another thing in DeepSpeed: it holds
# *one* tensor of a part, and AdamW has four (weight, gradient, two moments), so the default of four buffers is one part
# there, and two parts at once need eight. `pin_memory` has a meaning only where there is a GPU. One key is refimpl's
# own, `delayed_update` (section 5).

# %% [markdown]
# ## 5. Measure it
#
# ZeRO-2 on two ranks, three steps, with each home. What is in memory between backward and step, what the disk moved in
# the last step, and the weights against the run without a home:

# %% tags=["hide-input"]
predict(
    "AdamW's state on the disk. Bytes read of each parameter that a rank owns, in a step?",
    12,
    unit="bytes",
    why="Master weight and two moments, 4 each. The gradient comes from backward, and is in memory.",
)


# %%
import functools

from refimpl.measure.memory import MemoryMeter

SUB_GROUP = 1 << 13


def trained(home, sub_group=SUB_GROUP, **more):
    """On every rank: memory by class, [read, written] in a step, the parts' sizes, the weights."""
    torch.manual_seed(0)
    model = GPT(shape)
    config = ZeroConfig(
        optimizer_home=home, sub_group_size=sub_group, reduce_bucket_size=30_000, **more
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stage = Zero2(model, adamw, Group.world(), config)
    file = home.file if isinstance(home, Disk) else None
    for step in range(3):
        before = [file.read_bytes, file.written_bytes] if file else [0, 0]
        stage.backward(model(*batches.batch(step, stage.group.rank)))
        memory = MemoryMeter(stage.tensors).now()
        stage.step()
    after = [file.read_bytes, file.written_bytes] if file else [0, 0]
    moved = [b - a for a, b in zip(before, after, strict=True)]
    parts = [part.weights.numel() for part in stage.update.parts] if home else []
    stage.catch_up()  # with an update that is late, below
    weights = {name: stage.full_parameter(name) for name in stage.names.values()}
    return memory, moved, parts, weights


def on_disk(sub_group=SUB_GROUP, gradients=False, **more):
    """On every rank: as `trained`, with a file of its own."""
    disk = Disk(folder)
    if gradients:
        more["gradient_home"] = disk
    return trained(disk, sub_group, **more)


CLASSES = ["parameters", "gradients", "optimizer", "master weights", "offload buffers"]
runs = {
    "device": launch.run(trained, None, ranks=2)[0],
    "host": launch.run(trained, Host(), ranks=2)[0],
    "disk": launch.run(on_disk, ranks=2)[0],
    "disk, gradients too": launch.run(on_disk, SUB_GROUP, True, ranks=2)[0],
}
columns = {}
for name, (memory, _, _, weights) in runs.items():
    same = all(torch.equal(weights[key], runs["device"][3][key]) for key in weights)
    columns[name] = [*(f"{memory.get(c, 0) / (Psi / 2):.1f}" for c in CLASSES), same]
pd.DataFrame(columns, index=[*CLASSES, "equal bits"]).rename_axis("bytes a parameter owned")

# %% [markdown]
# - **device**: 8 for the whole weights of ZeRO-2 on 2 ranks (4 for each, and a rank owns half of them), 8 for AdamW.
# - **host**: on this machine the device *is* the host. `Host` then keeps fp32 masters apart from the weights, 4 bytes
#   more. On a GPU the last 12 are in the host's memory, and pinned.
# - **disk**: what remains of the optimizer are its counts of steps. The buffers look large because the model is small:
#   four parts, and they do not grow with it.
# - **gradients too** (`gradient_home=disk`): each bucket's shard is written as soon as it is reduced, inside backward,
#   and read again with the part that it updates. Two buffers more carry it there, and every part's buffer has room for
#   it. What is left in memory no longer grows with the model, but for the weights. (A `Host` may be the home of
#   gradients too: on a GPU they then leave by the link, bucket by bucket.)
#
# Formula beside count, to the byte. Records are whole pages, and one spare page is for parameters (chapter 09):


# %%
def pages(nbytes):
    return -(-nbytes // PAGE) * PAGE


def moved_each_way(parts, gradients):
    return sum(pages(12 * n) + gradients * pages(4 * n) for n in parts)


def in_buffers(parts, gradients):
    part, gradient = pages(12 * max(parts)), gradients * pages(4 * max(parts))
    return 4 * (part + gradient) + 2 * gradient + PAGE


formula, counted = {}, {}
for name, gradients in (("disk", False), ("disk, gradients too", True)):
    memory, (read, written), parts, _ = runs[name]
    formula[f"{name}: read"] = formula[f"{name}: written"] = moved_each_way(parts, gradients)
    formula[f"{name}: buffers"] = in_buffers(parts, gradients)
    counted |= {f"{name}: read": read, f"{name}: written": written}
    counted[f"{name}: buffers"] = memory["offload buffers"]
show.compare(formula, counted)

# %% [markdown]
# Every home gives the same bits, and so they do at 3 and 4 ranks, under every stage, with clipping, accumulation and
# overflow ([test_offloaded.py](../tests/zero/test_offloaded.py)). `sub_group_size` sets the size of a part, and with it
# memory:

# %%
rows = {}
for name, how in {
    "2,048": {"sub_group": 1 << 11},
    "8,192": {"sub_group": 1 << 13},
    "32,768": {"sub_group": 1 << 15},
    "8,192, ratio 0.5": {"sub_group": 1 << 13, "offload_ratio": 0.5},
}.items():
    memory, moved, parts, _ = launch.run(functools.partial(on_disk, **how), ranks=2)[0]
    rows[name] = [
        len(parts),
        f"{memory['offload buffers']:,}",
        f"{moved[0] / (12 * sum(parts)) - 1:.1%}",
        f"{sum(parts) / (Psi / 2):.0%}",
    ]
pd.DataFrame.from_dict(
    rows,
    orient="index",
    columns=["parts", "buffers, bytes", "moved for padding", "on the disk"],
).rename_axis("sub_group_size")

# %% [markdown]
# Large parts make few, long requests, which disks like; small parts make small buffers. A part never spans two buckets,
# so beyond a bucket's size nothing changes. DeepSpeed's default is a thousand million elements: four buffers of 4 GB
# there, 12 GB each here. Lower it before you blame the disk. `ratio` below 1 leaves some buckets on the device, for a
# device that has room for them (DeepSpeed's name is Twin-Flow, for its stage 3).
#
# **This machine's own limit.** What can its disk do, and what does `Disk` get out of it? Then the formula of section 2,
# with measured numbers: at how many tokens a step does the disk take as long as forward and backward?

# %% tags=["nbval-ignore-output"]
from refimpl.bench.disk import measure

rows = [row for heat in measure(folder, 256 << 20, turns=3) for row in heat]
plain_rows = [row for row in rows if row.who == "plain"]
best = {
    way: max(row.MB_per_s for row in plain_rows if row.direction == way)
    for way in ("read", "write", "both", "update")
}
ours = next(row for row in rows if row.who == "Disk")

tokens = 8 * 32
torch.manual_seed(0)
model = GPT(GPTConfig(context=32, width=256, layers=4, heads=4))
n = sum(p.numel() for p in model.parameters())
seconds = []
for step in range(4):
    begun = time.perf_counter()
    model(*batches.batch(step, 0)).backward()
    seconds.append(time.perf_counter() - begun)
speed = 6 * n * tokens / min(seconds)  # operations a second
needed = 24 * speed / (6 * ours.MB_per_s * 1e6)
pd.Series(
    {
        "disk alone, read, MB/s": f"{best['read']:,.0f}",
        "disk alone, write": f"{best['write']:,.0f}",
        "disk alone, in turn": f"{2 / (1 / best['read'] + 1 / best['write']):,.0f}",
        "disk alone, both at once": f"{best['both']:,.0f}",
        "disk alone, read, changed and written": f"{best['update']:,.0f}",
        "Disk: pipeline, checksums, updates on one core": f"{ours.MB_per_s:,.0f}, {ours.ratio:.0%} of that",
        "one core, forward and backward": f"{speed / 1e9:,.0f} GFLOP/s",
        "tokens at which the disk takes as long": f"{needed:,.0f}",
    },
    name="this machine",
).to_frame()

# %% [markdown]
# In turn, and both at once: these two tell how much a pipeline can gain here. If the disk is no faster at both than in
# turn, it can gain the update's time and no more. The line below them is plain threads that also change what they have
# read before they write it: those bytes lie in a core's cache then, from which some disks (a virtual machine's) fetch
# them more slowly. A slow device is easily kept busy: one core needs few tokens. A device that is a thousand times as
# fast, with a disk like this one, needs a thousand times as many. On your own machine: `refimpl bench disk FOLDER`, and
# `refimpl bench offload`, in which a step with each home takes turns with a plain one.
#
# **Wear.** Flash remembers how often it was written. A data sheet states an endurance in terabytes written (TBW), such
# as 1,200 for a drive of 2 TB. A step writes 12 bytes a parameter, 16 with gradients:

# %% tags=["hide-input"]
days = 1200e12 / (12 * 7e9) * 10 / 86400
predict(
    "7 billion parameters, all state on one drive that endures 1,200 TB, a step every 10 seconds. After how many days is "
    "the drive worn out?",
    days,
    unit="days",
    why="84 GB a step, 14,286 steps.",
)

# %%
endures, step_s = 1200e12, 10  # bytes, seconds
rows = {}
for billions in (1, 7, 70):
    rows[f"{billions} B"] = [
        f"{12 * billions:,} GB",
        *(
            f"{endures * drives * step_s / (12 * billions * 1e9) / 86400:,.1f} days"
            for drives in (1, 8)
        ),
    ]
pd.DataFrame.from_dict(
    rows, orient="index", columns=["written a step", "one drive", "8 ranks, a drive each"]
).rename_axis("parameters")

# %% [markdown]
# That is why a large batch (fewer steps for the same text) is kind to the drive, and why host memory comes first where
# it is enough.
#
# **One step late.** There is a way to hide the update after all: let it run *beside* the next forward and backward.
# Their gradients are then those of weights that miss one update, $w_{t+1} = w_t + U(g_{t-1})$. ZeRO-Offload calls it
# **delayed parameter update**. The time is hidden. What does it cost? A loop by hand, in one process:


# %%
def losses(late_from, steps=150):
    """AdamW, which from step `late_from` on gets the gradients of the step before."""
    torch.manual_seed(0)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found, before = [], None
    for step in range(steps):
        loss = model(*batches.batch(step, 0))
        model.zero_grad()
        loss.backward()
        found.append(loss.item())
        now = [p.grad for p in model.parameters()]
        given = before if step >= late_from else now
        before = now
        if given is not None and step != late_from:  # that step's come with the next
            for p, grad in zip(model.parameters(), given, strict=True):
                p.grad = grad
            optimizer.step()
    return found


late_runs = {
    "plain": losses(10**9),
    "late from step 40 on": losses(40),
    "late from the start": losses(0),
}

# %% tags=["nbval-ignore-output", "hide-input"]
figure, axis = show.figure(2.8)
for (name, found), colour in zip(late_runs.items(), COLOURS.values(), strict=True):
    smooth = pd.Series(found).rolling(20).mean()
    axis.plot(smooth, color=colour, label=f"{name}: {smooth.iloc[-1]:.2f}")
axis.set(xlabel="step", ylabel="loss, mean of 20 steps", ylim=(None, 4))
axis.legend(frameon=False, title="loss at the end")
plt.show()
level = pd.Series(late_runs["late from the start"]).rolling(20).mean().iloc[-1]
reached = int((pd.Series(late_runs["plain"]).rolling(20).mean() <= level).idxmax())
print(f"Where the late run is after {len(found)} steps, the plain one was after {reached}.")

# %% [markdown]
# The same model on the same text needs more steps for the same loss: many more than the one that the gradient is late.
# The delay hurts while weights change fast, so the paper lets a few dozen plain steps pass first. In a long run, with
# large batches and a small learning rate, less is lost. Measure it on your own model before you switch it on, beside a
# larger batch, which makes the update's share small without stale gradients.
#
# A stage does it with `ZeroConfig(optimizer_home=disk, delayed_update=True)`: the update runs in a thread, on masters
# that the model does not see, and its weights are brought over in the next `step()`. `stage.catch_up()` waits for the
# last one. Its oracle is a plain loop, in one process, that applies every gradient one step late:


# %%
def one_step_late(steps=3, ranks=2):
    """The weights of one process that adds up the ranks' gradients, and uses them in the next step."""
    torch.manual_seed(0)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = None
    for step in range(steps + 1):
        now = None
        if step < steps:
            model.zero_grad()
            for r in range(ranks):
                model(*batches.batch(step, r)).backward()
            now = [p.grad / ranks for p in model.parameters()]
        if before is not None:
            for p, grad in zip(model.parameters(), before, strict=True):
                p.grad = grad
            optimizer.step()
        before = now
    return {name: p.detach() for name, p in model.named_parameters()}


late = launch.run(functools.partial(on_disk, delayed_update=True), ranks=2)[0][3]
loop = launch.run(one_step_late, ranks=1)[0]
print("equal to the loop:", all(torch.equal(late[name], loop[name]) for name in loop))
print(
    "equal to no delay:", all(torch.equal(late[name], runs["device"][3][name]) for name in loop)
)

# %% [markdown]
# `DelayedUpdate` in the exercises is that thread, by your hand. It needs a second copy of gradients and of weights:
# what is waiting must not change.

# %% [markdown]
# ## 6. Break it
#
# **The buffer that was not free.** The famous bug of every pipeline: a part is read into a buffer while what the buffer
# held is still being written. One `wait` too few does it. Here is a write whose `wait` returns at once, as a copy that
# nobody synchronised does; every byte of eight parts is to become 100 more:


# %%
from refimpl.offload.blocks import OffloadError
from refimpl.offload.pipeline import pipelined


class Forgotten:
    """A transfer for which nobody waits, until all is over."""

    def __init__(self, transfer):
        self.transfer = transfer

    def wait(self):
        pass


def outcome(file, careful):
    """Eight parts of 1 MiB, part k full of k + 1, through three buffers."""
    records = [file.record(1 << 20) for _ in range(8)]
    buffers = [Buffer(1 << 20) for _ in range(3)]
    for k, record in enumerate(records):
        buffers[0].bytes.fill_(k + 1)
        file.write(record, buffers[0]).wait()
    writes = []

    def write(record, buffer):
        writes.append(file.write(record, buffer))
        return writes[-1] if careful else Forgotten(writes[-1])

    try:
        for _, buffer in pipelined(records, buffers, file.read, write):
            buffer.bytes.add_(100)
        for transfer in writes:
            transfer.wait()
        right = True
        for k, record in enumerate(records):
            file.read(record, buffers[0]).wait()
            right &= bool((buffers[0].bytes == k + 101).all())
    except OffloadError:
        return "an error: the disk is failing"
    finally:
        for transfer in writes:
            transfer.wait()
    return "right" if right else "wrong, and no error"


class Slow(BlockFile):
    """A disk that is busy with somebody else: a write takes 20 ms longer."""

    def _write_block(self, offset, block):
        time.sleep(0.02)
        super()._write_block(offset, block)


# %% tags=["hide-input"]
predict(
    "The careless pipeline runs 20 times on this machine's disk. What comes of it?",
    "it depends on the day",
    options=["wrong numbers every time", "right numbers every time", "it depends on the day"],
    why="It is a race. A fast disk has often written the part before its buffer is wanted again.",
)

# %% tags=["nbval-ignore-output"]
runs = {
    "this disk, careful": [outcome(BlockFile(folder), True) for _ in range(20)],
    "this disk, careless": [outcome(BlockFile(folder), False) for _ in range(20)],
    "a busy disk, careful": [outcome(Slow(folder), True) for _ in range(3)],
    "a busy disk, careless": [outcome(Slow(folder), False) for _ in range(3)],
}
for name, found in runs.items():
    print(f"{name}: {', '.join(f'{times} x {what}' for what, times in Counter(found).items())}")

# %% [markdown]
# On a fast disk some runs are right, and a test that looks at results may pass. The others, and all on a busy disk, end
# with a checksum that does not fit, of bytes that changed while they were on their way, and the report accuses the
# disk. Without checksums it would be worse: some parts would hold the numbers of others, with no NaN and no error, and
# a loss that is somewhat higher. To run it more often is no remedy. This is: a disk that does everything as *late* as
# it is allowed to, and knows who was too early.

# %%
from refimpl.grading.compare import Wrong

late = LateDisk()
buffers = [late.buffer(PAGE) for _ in range(3)]


def read(k, buffer):
    return late.read(k * PAGE, buffer)


def write(k, buffer):
    return Forgotten(late.write(k * PAGE, buffer))


try:
    for _, buffer in pipelined(range(8), buffers, read, write):
        buffer.add_(1)
except Wrong as wrong:
    print(wrong.headline)

# %% [markdown]
# Found in the first run, on any machine, without a thread: part 3 is read into the buffer of part 0. The exercises are
# graded on this disk. CUDA streams have the same bug (a copy with `non_blocking=True` from memory that is used again),
# and a like cure: a log of who touches what, and which waits order it.
#
# Its relative is an error *in the middle* of a step: a disk or a cable gives back another block than it was given. Some
# parts are then a step ahead of the others, and training could go on without a word. A second slot for each part, in
# which the old one stays until the step is over, could undo the step, for twice the disk; it would not bring back the
# block that is lost. So refimpl keeps one copy. Before a step it compares the file's length and date with those that it
# left. If *somebody else* has cut the file or written to it, every part is read first, and an error then has changed
# nothing. After an error in the middle of a step refimpl tells every rank at once, and refuses to compute with, show or
# save what is of half a step, until a checkpoint is loaded. Gradients that the disk loses inside backward are found
# before anything is updated: the state before the step stays, and training goes on.

# %%
scratch.cleanup()

# %% [markdown]
# ## 7. Prove it
#
# How others do it:
#
# | | optimizer state rests | who updates | the link is hidden by |
# |---|---|---|---|
# | DeepSpeed, `offload_optimizer` | host or NVMe | `DeepSpeedCPUAdam`, vectorised C++ | gradients leave in backward; NVMe: `pipeline_read`, `pipeline_write` |
# | FSDP2, `CPUOffloadPolicy` | host, and parameters too | torch's AdamW at the host | pinned memory, copies beside backward |
# | Megatron-LM, `--optimizer-cpu-offload` | host, a fraction (`--optimizer-offload-fraction`) | torch's AdamW at the host | `--overlap-cpu-optimizer-d2h-h2d` |
# | refimpl, `optimizer_home` | host or disk, a `ratio` | the user's torch optimizer, part by part | `pipelined`, four buffers; `delayed_update` |
#
# refimpl's disk was timed on CPUs only; on a GPU its homes have not run yet.
#
# - **See it whole:** `refimpl demo --infinity` gives each rank a memory limit in which DDP, ZeRO-2 and ZeRO-3 die, and
#   trains with all of the state on the disk.
# - **Exercises:** [exercises/08_offload](../exercises/08_offload/exercise.py): `pytest exercises/08_offload`
# - **Quiz:** `refimpl quiz --topic memory`, or `Quiz("memory")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/offload](../tests/offload/test_pipeline.py): order of events, a full disk, an
#   altered block, a killed process; [tests/zero/test_offloaded.py](../tests/zero/test_offloaded.py): bits for every home.
# - **Code:** [homes.py](../refimpl/offload/homes.py), [blocks.py](../refimpl/offload/blocks.py),
#   [pipeline.py](../refimpl/offload/pipeline.py), [offloaded.py](../refimpl/zero/offload/offloaded.py),
#   [parts.py](../refimpl/zero/offload/parts.py), [delayed.py](../refimpl/zero/offload/delayed.py).
# - **DeepSpeed:**
#   [deepspeed/runtime/swap_tensor/pipelined_optimizer_swapper.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/swap_tensor/pipelined_optimizer_swapper.py).
# - **Papers:** Ren et al. 2021, [arXiv:2101.06840](https://arxiv.org/abs/2101.06840) (the host; section 5.2: one step
#   late). Rajbhandari et al. 2021, [arXiv:2104.07857](https://arxiv.org/abs/2104.07857) (the disk; sections 4 and 6).
