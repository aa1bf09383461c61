"""Grades chapter 05's formulas: bytes sent with several backwards, and the most that gradients take."""

import torch
from torch import Tensor, nn, optim

from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import (
    WatchedGroup,
)
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.ddp import DDP
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2

F32 = torch.float32


STAGES: dict[str, type[Stage]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2}


@on_ranks(2, 3)
def test_accumulated_bytes(answer: Answer, group: WatchedGroup) -> None:
    for name, kind in STAGES.items():
        for samples, room, dtype in ((1, 4, F32), (4, 4, F32), (5, 2, F32), (6, 1, F32), (5, 2, torch.bfloat16)):
            case(f"{name}, {samples} samples, room for {room}, {dtype}")
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 6, bias=False), nn.Linear(6, 64, bias=False)).to(dtype)
            stage = kind(model, optim.AdamW(model.parameters()), group.oracle())
            stage.group.ledger.reset()
            batches = torch.ones(samples, 64).split(room)
            for batch in batches:
                stage.backward(model(batch.to(dtype)).sum(), sync=batch is batches[-1])
            stage.step()
            counted: dict[str, int] = {}
            for e in stage.group.ledger.events:
                if e.phase == "start" and e.tag in ("gradients", "parameters"):
                    counted[e.op] = counted.get(e.op, 0) + e.sent_bytes
            padded = sum(b.padded for b in stage.buckets)
            found = answer.accumulated_bytes(name, padded, group.size, dtype.itemsize, samples, room)
            evidence = [
                f"{padded} parameters of {dtype.itemsize} bytes, {group.size} ranks, {len(batches)} backwards",
                f"  counted  {counted}",
                f"  found    {found}",
            ]
            require(isinstance(found, dict), f"the result is {found!r}, expected a dict", *evidence)
            judge_bytes(found, counted, name, len(batches), evidence, samples, room)
    case("64 ranks: zero2, 640 parameters of 2 bytes, one backward")
    chunks = dict.fromkeys(("reduce_scatter", "all_gather"), 63 * 10 * 2)  # to each other rank a chunk of 10
    judge_bytes(answer.accumulated_bytes("zero2", 640, 64, 2, 3, 4), chunks, "zero2", 1, [], 3, 4)


def judge_bytes(
    found: dict[str, int], counted: dict[str, int], name: str, backwards: int, evidence: list[str], samples: int,
    room: int,
) -> None:  # fmt: skip
    require(found.keys() == counted.keys(), f"{name} sends with {' and '.join(counted)} only", *evidence)
    for op, sent in counted.items():
        why = ""
        if found[op] * backwards == sent:
            why = f": {name} sends with each of {backwards} backwards"
        elif found[op] == sent * backwards:
            why = f": {name} does this once a step, not with each backward"
        elif op == "all_reduce" and 2 * found[op] == sent:
            why = ": exactly half, and an all-reduce has two halves"
        elif name == "zero2" and found[op] * backwards == sent * samples > sent:
            why = f": that is with each of {samples} samples, and a backward takes {room} at once"
        elif name == "zero2" and found[op] * backwards == sent * (samples // room + 1) > sent:
            why = f": one backward too many: {samples} samples, {room} at once, are {backwards}"
        elif op == "reduce_scatter" and found[op] < sent:
            why = ": does the last micro-batch, which is not full, count too?"
        elif found[op] == 2 * sent:
            why = ": exactly 2x: is `itemsize` what an element takes?"
        require(found[op] == sent, f"{name}: {found[op]} bytes by {op}, the ledger counts {sent}{why}", *evidence)
        whole = f"{name}: {found[op]!r} bytes by {op}: bytes are whole numbers, divide by //"
        require(isinstance(found[op], int), whole, *evidence)


@on_ranks(2, 3, 4)
def test_peak_gradient_bytes(answer: Answer, group: WatchedGroup) -> None:
    for buckets in ([8, 4], [4, 8], [24], [6, 6, 6, 6], [7, 1, 5, 12], [1, 1, 30]):
        for dtype, ranks in ((torch.float32, group.size), (torch.bfloat16, group.size), (torch.bfloat16, 16)):
            case(f"buckets {buckets}, {dtype.itemsize} bytes an element, {ranks} ranks")
            expected, story = counted_peak(buckets, group, dtype, ranks)
            with untouched(buckets=buckets):
                found = answer.peak_gradient_bytes(buckets, ranks, dtype.itemsize)
            require(isinstance(found, int), f"the result is {found!r}, expected a whole number of bytes: divide by //")
            if found == expected:
                continue
            padded = [-(-n // ranks) * ranks for n in buckets]
            shards = sum(padded) // ranks
            known = {
                "that is the largest bucket: shards take memory too": max(padded),
                "that is when the last bucket travels: the most may have been before": shards + padded[-1],
                "that is a whole gradient: the buckets before are freed already": sum(padded),
                "that is what stays in the end: a bucket that travels is larger than its shard": shards,
                "that is all shards and the largest bucket: are all shards there when it travels?": shards
                + max(padded),
                "padding takes memory too: of the flat buffer, and of the shard": max(
                    sum(padded[: i + 1]) // ranks + n for i, n in enumerate(buckets)
                ),
                "the shards of the buckets before stay": max(p // ranks + p for p in padded),
                "that is all buckets at once: each goes before the next begins": shards + sum(padded),
            }
            why = next((k for k, v in known.items() if v * dtype.itemsize == found), "")
            raise Wrong(f"{found} bytes, counted {expected}" + (f": {why}" if why else ""), *story)


def counted_peak(buckets: list[int], group: WatchedGroup, dtype: torch.dtype, ranks: int) -> tuple[int, list[str]]:
    """Send the buckets one after another (if there are as many ranks) and count what is alive each time."""
    shards: list[Tensor] = []
    peak, story = 0, ["alive while each bucket travels, in bytes:"]
    for number, numel in enumerate(buckets):
        shard = -(-numel // ranks)
        flat = torch.zeros(shard * ranks, dtype=dtype)
        shards.append(torch.empty(shard, dtype=dtype))
        if ranks == group.size:
            group.oracle().reduce_scatter(shards[-1], flat)
        sizes = MemoryMeter(lambda flat=flat: {"flat": [flat], "shards": shards}).now()
        story.append(f"  bucket {number}: flat buffer {sizes['flat']}, shards {sizes['shards']}")
        peak = max(peak, sizes["flat"] + sizes["shards"])
    return peak, story
