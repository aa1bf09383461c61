"""Grades chapter 03's formulas: bytes kept and bytes sent, as refimpl's stages and ledger count them."""

import torch
from torch import nn, optim

from refimpl.grading.compare import require
from refimpl.grading.grade import on_ranks
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.ddp import DDP
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: dict[str, type[Stage]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


@on_ranks(3, 2)  # 3 first: with 2, a shard and 16 bits in place of 32 are the same factor
def test_memory_bytes(answer: Answer, group: WatchedGroup) -> None:
    whole: dict[tuple[torch.dtype, str], int] = {}  # what a class takes where nothing is sharded
    for name in STAGES:
        for dtype in (torch.float32, torch.bfloat16):
            case(f"{name}, {dtype}")
            stage = build(name, dtype, group)
            stage.backward(stage.model(torch.ones(2, 64, dtype=dtype)).sum())
            counted = MemoryMeter(stage.tensors).now()
            stage.step()
            state = MemoryMeter(stage.tensors).now()["optimizer"] - 4 * len(stage.buckets)  # less AdamW's step counts
            counted |= {"optimizer": state}
            padded = sum(b.padded for b in stage.buckets)
            found = answer.memory_bytes(name, padded, group.size, dtype.itemsize)
            require(isinstance(found, dict), f"the result is {found!r}, expected a dict")
            evidence = [
                f"{padded} parameters, {dtype.itemsize} bytes each, {group.size} ranks",
                "  class            yours   counted on refimpl",
            ]
            keys = ("parameters", "gradients", "optimizer", "master weights")
            all_keys(found, keys)
            evidence += [f"  {k:<14} {found.get(k, 0):>7}   {counted[k]:>7}" for k in keys]
            for key in keys:
                mine, theirs = found.get(key), counted[key]
                hint = times(mine, theirs)
                whole.setdefault((dtype, key), theirs)
                if key == "optimizer" and mine == theirs * dtype.itemsize // 4:
                    hint = f": AdamW's two numbers are fp32, 8 bytes a parameter, also where the model is {dtype}"
                elif mine and not theirs:
                    hint = f": a model of {dtype} has none, it is its own master"
                elif mine == theirs * group.size:
                    hint = f": {name} shards it over the ranks"
                elif theirs == (mine or 0) * group.size:
                    hint = f": {name} does not shard it"
                require(mine == theirs, f"{name}: {mine} bytes of {key}, counted {theirs}{hint}", *evidence)
                require(
                    isinstance(mine, int), f"{name}: {mine!r} bytes of {key}: bytes are whole numbers, divide by //"
                )
            case(f"{name}, {dtype}, on one rank")
            alone = answer.memory_bytes(name, padded, 1, dtype.itemsize)
            for key in keys:
                wanted = whole[dtype, key]
                require(alone[key] == wanted, f"{alone[key]} bytes of {key}, expected {wanted}: nobody has a share")
            case(f"{name}, {dtype}, 32 times the parameters on 32 times the ranks")
            larger = answer.memory_bytes(name, 32 * padded, 32 * group.size, dtype.itemsize)
            for key in keys:
                sharded = counted[key] * group.size == whole[dtype, key]
                wanted = counted[key] * (1 if sharded else 32)
                require(larger[key] == wanted, f"{name}: {larger[key]} bytes of {key}, expected {wanted}")


@on_ranks(3, 2)
def test_sent_bytes(answer: Answer, group: WatchedGroup) -> None:
    for name in STAGES:
        for micro_batches, dtype in ((1, torch.float32), (4, torch.float32), (1, torch.bfloat16)):
            case(f"{name}, {micro_batches} micro-batches, {dtype}")
            stage = build(name, dtype, group)
            stage.group.ledger.reset()
            for i in range(micro_batches):
                stage.backward(stage.model(torch.ones(2, 64, dtype=dtype)).sum(), sync=i == micro_batches - 1)
            stage.step()
            counted = stage.group.ledger.sent_bytes("tag")
            padded = sum(b.padded for b in stage.buckets)
            found = answer.sent_bytes(name, padded, group.size, dtype.itemsize, micro_batches)
            require(isinstance(found, dict), f"the result is {found!r}, expected a dict")
            evidence = [
                f"{padded} parameters of {dtype.itemsize} bytes, {group.size} ranks, {micro_batches} micro-batches",
                *stage_story(stage),
            ]
            all_keys(found, ("gradients", "parameters"))
            for key in ("gradients", "parameters"):
                mine, theirs = found[key], counted.get(key, 0)
                hint = times(mine, theirs)
                gathers = (name, key) == ("zero3", "parameters")  # of which one too many is as much, at 3 ranks
                if theirs and not gathers and mine * (group.size - 1) == theirs * group.size:
                    hint = f": a rank keeps its own part, and sends {group.size - 1} of {group.size}"
                if mine == theirs * micro_batches > theirs:
                    hint = f": {name} does this once a step, not with each of {micro_batches} micro-batches"
                elif (mine or 0) * micro_batches == theirs > (mine or 0):
                    hint = f": {name} does this with each of {micro_batches} micro-batches"
                elif dtype.itemsize == 2 and mine == 2 * theirs:
                    hint = ": an element has `itemsize` bytes on the wire, here 2"
                require(mine == theirs, f"{name}: {mine} bytes of {key}, the ledger says {theirs}{hint}", *evidence)
                whole = f"{name}: {mine!r} bytes of {key}: bytes are whole numbers, divide by //"
                require(isinstance(mine, int), whole, *evidence)
    case("zero2, 640 parameters of 2 bytes, 64 ranks, 3 micro-batches")
    once = 63 * 10 * 2  # to each other rank a chunk of 10
    found, expected = answer.sent_bytes("zero2", 640, 64, 2, 3), {"gradients": 3 * once, "parameters": once}
    require(found == expected, f"{found}, expected {expected}: each rank sends a chunk to each of 63 others")


def all_keys(found: dict[str, int], keys: tuple[str, ...]) -> None:
    missing = ", ".join(repr(key) for key in keys if key not in found)
    require(not missing, f"the result has no {missing}: each of {', '.join(keys)} is asked, 0 where there are none")


def build(name: str, dtype: torch.dtype, group: WatchedGroup) -> Stage:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 6, bias=False), nn.Linear(6, 64, bias=False)).to(dtype)
    return STAGES[name](model, optim.AdamW(model.parameters()), group.oracle())


def stage_story(stage: Stage) -> list[str]:
    calls = stage.group.ledger.calls("tag")
    return ["what refimpl sent:"] + [
        f"  {tag:<12} {calls[tag]} calls, {sent} bytes"
        for tag, sent in stage.group.ledger.sent_bytes("tag").items()
        if tag in ("gradients", "parameters")
    ]


def times(mine: object, theirs: int) -> str:
    """ ": exactly 2x" or ": exactly 1/2", if it is."""
    if not isinstance(mine, int) or not mine or not theirs:
        return ""
    if mine % theirs == 0:
        return f": exactly {mine // theirs}x"
    return f": exactly 1/{theirs // mine}" if theirs % mine == 0 else ""
