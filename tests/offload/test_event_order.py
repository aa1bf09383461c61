"""What rests at the host or on a disk: no copy is read, or its memory written, before it is done (see paper.py)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import paper
import pytest
import torch
from stream_log import COMPUTE, Kernel, Recorder, Watch
from torch import Tensor
from training import STAGES, Net, tokens

from refimpl import launch
from refimpl.checkpoint.background import Background
from refimpl.comm.group import Group
from refimpl.offload.blocks import BlockFile, Buffer, Record, Transfer
from refimpl.offload.homes import Disk, Host
from refimpl.offload.shelf import HostShelf
from refimpl.zero.config import ZeroConfig
from refimpl.zero.loop.parked import CLASSES
from refimpl.zero.optimizer.masters import follow
from refimpl.zero.stage import Stage

pytestmark = pytest.mark.xdist_group("pretend")
ALL = ("optimizer_home", "gradient_home", "parameter_home")
PARTS = 3  # buckets of `Net`, of a part each
# What the program itself waits for, the first copies, and numbers, which the log does not follow.
KNOWN = {"host: call", "host: place", "host: __init__", "result: __init__", "inputs: share", "host: _agree"}


def made(stage: str, group: Group, **config: Any) -> tuple[Net, Stage]:
    torch.manual_seed(0)
    model = Net(layers=1).to(paper.DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, STAGES[stage](
        model, optimizer, group, ZeroConfig(reduce_bucket_size=700, check_order=False, **config)
    )


def batch(step: int, micro: int = 0) -> Tensor:
    return tokens(step, micro).to(paper.DEVICE, non_blocking=True)


def train(group: Group, recorder: Recorder, watch: Watch, stage: str, micro_batches: int = 1, **config: Any) -> None:
    model, zero = made(stage, group, **config)
    for step in range(3):
        watch.asked.clear()
        for micro in range(micro_batches):
            zero.backward(model(batch(step, micro)), sync=micro == micro_batches - 1)
        zero.step()
    zero.catch_up()


def trained(on_paper: launch.World, *args: Any, **config: Any) -> paper.Seen:
    seen: paper.Seen = on_paper.call(paper.seen, partial(train_on, args, config))[0]
    return seen


def train_on(args: Any, config: dict[str, Any], group: Group, recorder: Recorder, watch: Watch) -> None:
    train(group, recorder, watch, *args, **config)


CASES = [
    ("ddp", 1, ALL[:1]), ("zero1", 2, ALL[:1]), ("zero2", 2, ALL[:1]), ("zero2", 1, ALL[:2]), ("zero2", 2, ALL[:2]),
    ("zero3", 1, ALL[:1]), ("zero3", 1, ALL), ("zero3", 2, ALL),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "micro_batches", "homes"), CASES)
def test_a_home_at_the_host_races_with_nothing(
    stage: str, micro_batches: int, homes: tuple[str, ...], on_paper: launch.World
) -> None:
    """Each wait is needed. What is added to gradients at the host is waited for, so nothing is left to arrive.

    A gather is behind the copy that brings its shard, which has waited for the same already.
    """
    seen = trained(on_paper, stage, micro_batches, **dict.fromkeys(homes, Host()))
    assert seen.races == []
    needless = {"host: arrived"} if micro_batches > 1 else set()
    needless |= {"inputs: gather"} if "parameter_home" in homes else set()
    assert seen.needless <= KNOWN | needless | {"host: write"}  # see `test_a_shelf_is_written_behind_its_reads`


def brought(group: Group, recorder: Recorder, watch: Watch) -> None:
    model, zero = made("zero3", group, optimizer_home=Host(), parameter_home=Host())
    recorder.log.clear()
    zero.backward(model(batch(0)))
    at_host = {watch._block_of(kept.untyped_storage()) for u in zero.units for kept in u.shelf.tensors()}  # type: ignore[attr-defined]
    streams = {entry.stream for entry in recorder.log if isinstance(entry, Kernel) and entry.reads & at_host}
    assert streams
    assert COMPUTE not in streams


def test_shards_come_from_the_host_beside_what_computes(on_paper: launch.World) -> None:
    """On the stream that gathers them: on the computing one the layer before would wait for the link."""
    on_paper.call(paper.seen, brought)


def test_the_host_waits_once_a_part_and_once_a_step(on_paper: launch.World) -> None:
    """For the weights of each part, which somebody may have written to; its gradient is at the host already."""
    seen = trained(on_paper, "zero2", 1, optimizer_home=Host(), gradient_home=Host())
    assert seen.asked.pop("host: follow") == PARTS
    assert seen.asked == {"host: arrived": 1, "host: _agree": 1}


def followed(masters: str, group: Group, recorder: Recorder, watch: Watch) -> None:
    weights = torch.ones(5 << 16, dtype=torch.bfloat16, device=paper.DEVICE)
    master = torch.ones(5 << 16, device=masters)
    before = len(recorder.log)
    follow(weights, master)
    launched = [e for e in recorder.log[before:] if isinstance(e, Kernel) and e.stream == COMPUTE and e.name != "free"]
    assert (watch.syncs, len(launched)) == ((1, 1) if masters == "cpu" else (0, 3))


@pytest.mark.parametrize("masters", ["cpu", paper.DEVICE])
def test_masters_follow_many_weights_at_a_time(masters: str, on_paper: launch.World) -> None:
    """Else each 128 KB would be a wait of the host, or three launches: of a shard of 100 million, thousands a step."""
    on_paper.call(paper.seen, partial(followed, masters))


def interrupted(stage: str, homes: tuple[str, ...], group: Group, recorder: Recorder, watch: Watch) -> None:
    """A backward raises while gradients travel, and training goes on."""
    model, zero = made(stage, group, **dict.fromkeys(homes, Host()))

    def fails(*_: object) -> None:
        raise MemoryError

    for step in range(4):
        loss = model(batch(step))
        handle = model.norm.weight.register_hook(fails) if step == 2 else None
        if handle is None:
            zero.backward(loss)
            zero.step()
        else:
            with pytest.raises(MemoryError):
                zero.backward(loss)
            handle.remove()


@pytest.mark.parametrize(("stage", "homes"), [("ddp", ()), ("zero1", ()), ("zero2", ALL[:2]), ("zero3", ALL)])
def test_after_an_exception_nothing_races(stage: str, homes: tuple[str, ...], on_paper: launch.World) -> None:
    assert on_paper.call(paper.seen, partial(interrupted, stage, homes))[0].races == []


class Now(Background):
    """The thread, as early or as late as may be. It begins on the default stream, whatever the caller's is."""

    late = False
    recorder: Recorder
    todo: Callable[[], object] | None = None

    def start(self, do: Callable[[], object], name: str) -> None:
        self.wait()
        self.todo = do
        if not self.late:
            self.wait()

    def wait(self) -> None:
        todo, self.todo = self.todo, None
        if todo is not None:
            before, self.recorder.stack = self.recorder.stack, [COMPUTE]
            todo()
            self.recorder.stack = before


def delayed(
    stage: str, late: bool, aside: bool, homes: tuple[str, ...], group: Group, recorder: Recorder, watch: Watch
) -> None:
    stream = recorder.new() if aside else COMPUTE
    recorder.followed_by(stream)
    behind = type("Behind", (Now,), {"late": late, "recorder": recorder})
    with patch("refimpl.zero.offload.delayed.Background", behind), recorder.use(stream):
        train(group, recorder, watch, stage, delayed_update=True, **dict.fromkeys(homes, Host()))
        recorder.followed_by(COMPUTE)
    beside = max(recorder.waits_of(": update"))
    assert beside not in (COMPUTE, stream)


# Not ZeRO-1 and 2: there the thread reads what the gather sends from its place in what it fills, which is one block.
@pytest.mark.parametrize(("stage", "homes"), [("ddp", ALL[:1]), ("zero3", ALL[:1]), ("zero3", ALL[:2])])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("aside", [False, True])
def test_a_late_update_runs_beside_the_forward(
    stage: str, homes: tuple[str, ...], late: bool, aside: bool, on_paper: launch.World
) -> None:
    """On a stream of its own, also where the program trains on another than the default one."""
    seen = on_paper.call(paper.seen, partial(delayed, stage, late, aside, homes))[0]
    assert seen.races == []
    assert seen.needless <= KNOWN


def with_files(program: Callable[..., None], group: Group, recorder: Recorder, watch: Watch) -> None:
    """`program`, with the host's accesses of what it writes to files and reads from them."""
    write, read = BlockFile.write, BlockFile.read

    def wrote(file: BlockFile, record: Record, buffer: Buffer) -> Transfer:
        watch.touch(buffer.bytes, write=False)
        return write(file, record, buffer)

    def was_read(file: BlockFile, record: Record, buffer: Buffer, start: int = 0) -> Transfer:
        watch.touch(buffer.bytes, write=True)
        return read(file, record, buffer, start)

    with patch.object(BlockFile, "write", wrote), patch.object(BlockFile, "read", was_read):
        program(group, recorder, watch)


@pytest.mark.parametrize(("stage", "homes"), [("zero2", ALL[:1]), ("zero2", ALL[:2]), ("zero3", ALL)])
def test_a_disk_races_with_nothing(stage: str, homes: tuple[str, ...], tmp_path: Path, on_paper: launch.World) -> None:
    program = partial(train_on, (stage, 2), dict.fromkeys(homes, Disk(tmp_path)))
    seen = on_paper.call(paper.seen, partial(with_files, program))[0]
    assert seen.races == []
    assert "host: round" not in seen.needless
    assert "host: send" not in seen.needless


def rewritten(group: Group, recorder: Recorder, watch: Watch) -> None:
    """As a forward and then a checkpoint that is loaded."""
    shelf = HostShelf(Host(), torch.ones(8, device=paper.DEVICE))
    shelf.read(torch.empty(8, device=paper.DEVICE))
    shelf.write(0, torch.zeros(8))


def test_a_shelf_is_written_behind_its_reads(on_paper: launch.World) -> None:
    seen = on_paper.call(paper.seen, rewritten)[0]
    assert (seen.races, seen.needless & {"host: write"}) == ([], set())


def looked_at(when: str, group: Group, recorder: Recorder, watch: Watch) -> None:
    """The host reads what a copy brings it."""
    there = torch.empty(8).copy_(torch.ones(8, device=paper.DEVICE), non_blocking=when != "waited for")
    if when == "synchronized":
        torch.accelerator.synchronize()
    there.sum()


@pytest.mark.parametrize("when", ["at once", "waited for", "synchronized"])
def test_the_log_sees_the_host(when: str, on_paper: launch.World) -> None:
    found = on_paper.call(paper.seen, partial(looked_at, when))[0].races
    assert found == (["aten.copy_.default on stream 0, aten.sum.default on stream -1"] if when == "at once" else [])


def there_and_back(stage: str, group: Group, recorder: Recorder, watch: Watch) -> None:
    """Between two steps, and between a backward and its step, without a wait."""
    model, zero = made(stage, group, dtype=torch.bfloat16)
    for step in range(2):
        zero.backward(model(batch(step)))
        for before_the_step in (True, False):
            before = watch.syncs
            zero.parked.send(list(CLASSES), non_blocking=True)
            zero.parked.bring(non_blocking=True)
            assert watch.syncs == before
            if before_the_step:
                zero.step()


@pytest.mark.parametrize("stage", STAGES)
def test_states_go_and_come_back_behind_each_other(stage: str, on_paper: launch.World) -> None:
    assert on_paper.call(paper.seen, partial(there_and_back, stage))[0].races == []
