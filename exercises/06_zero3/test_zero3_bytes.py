"""Grades chapter 06's formula: bytes kept and bytes gathered, as counted in refimpl's ZeRO-3."""

from itertools import pairwise

import torch
from torch import nn, optim

from refimpl.grading.calls import unwatched
from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.config import ZeroConfig
from refimpl.zero.zero3 import Zero3


@on_ranks(3, 2)  # 3 first: with 2, a class that is not sharded and fp32 in place of 16 bits are the same factor
def test_zero3_bytes(answer: Answer, group: WatchedGroup) -> None:
    plain, turned = (8, 40, 16, 24, 8, 8), (64, 8, 8, 24, 40, 8)  # turned: where the order of backward shows
    cases: list[tuple[list[int], int, int, dict[str, int]]] = []
    for widths, dtype, budgets in (
        (plain, torch.float32, (0, 300, 600, 700, 1500, 100_000)),
        (plain, torch.bfloat16, (0, 1000)),
        (turned, torch.float32, (700,)),
    ):
        for budget in budgets:
            case(f"{dtype}, budget {budget}")
            with unwatched():
                units, counted = count(group.oracle(), widths, dtype, budget)
            with untouched(units=units):
                found = answer.zero3_bytes(units, group.size, dtype.itemsize, budget)
            cases.append((units, dtype.itemsize, budget, counted))
            if budget and found != counted:
                right = all(answer.zero3_bytes(u, group.size, i, b * i) == told for u, i, b, told in cases)
                require(not right, "the budget counts elements, and you compare it with bytes")
            judge_bytes(found, counted, units, group.size, dtype.itemsize, budget)
    case("units [4, 8, 4], fp64, 2 ranks, budget 0")
    found, expected = answer.zero3_bytes([4, 8, 4], 2, 8, 0), {"kept": 8 * (8 + 8 + 8), "gathered": 8 * 8}
    own = "the weight and its gradient have 8 bytes here, AdamW's numbers 4 each, and fp64 needs no masters"
    require(found == expected, f"{found}, expected {expected}: {own}")
    for ranks in (16, 64):
        units = [ranks * n for n in (3, 5, 2)]
        case(f"units {units}, bf16, budget {4 * ranks}")
        one, many = (answer.zero3_bytes(units, n, 2, 4 * ranks) for n in (1, ranks))
        of_one = {"kept": one["kept"] // ranks, "gathered": one["gathered"]}
        require(many == of_one, f"on {ranks} ranks it is {many}; one rank's 1/{ranks} of what is kept is {of_one}")


def count(
    group: WatchedGroup, widths: tuple[int, ...], dtype: torch.dtype, budget: int
) -> tuple[list[int], dict[str, int]]:
    """The units of a model under refimpl's ZeRO-3, and the bytes that it really keeps and gathers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))
    model.to(dtype)
    stage = Zero3(model, optim.AdamW(model.parameters()), group, ZeroConfig(prefetch_bucket_size=budget))
    meter, x = MemoryMeter(stage.tensors), torch.ones(2, widths[0], dtype=dtype)
    stage.backward(model(x).sum())  # only records the trace
    stage.step()
    with meter:
        stage.backward(model(x).sum())
    kept = meter.now()
    stage.step()
    classes = MemoryMeter(stage.tensors).now() | {k: kept[k] for k in ("parameters", "gradients")}
    classes["optimizer"] -= 4 * len(stage.buckets)  # AdamW's step counts
    total = sum(classes[k] for k in ("parameters", "gradients", "optimizer", "master weights"))
    return [u.padded for u in stage.units], {"kept": total, "gathered": meter.peak["gathered"]}


def judge_bytes(
    found: object, counted: dict[str, int], units: list[int], ranks: int, itemsize: int, budget: int
) -> None:
    evidence = [f"units {units}, {ranks} ranks, {itemsize} bytes", f"  counted  {counted}", f"  found    {found}"]
    require(isinstance(found, dict), f"the result is {found!r}, expected a dict", *evidence)
    assert isinstance(found, dict)
    for key, sent in counted.items():
        mine = found.get(key)
        if mine == sent:
            require(isinstance(mine, int), f"{mine!r} bytes {key}: bytes are whole numbers, divide by //", *evidence)
            continue
        shared = sum(units) // ranks
        wrong: dict[str, dict[int, str]] = {
            "kept": {
                sent * ranks: "every class is sharded over the ranks",
                shared * (2 * itemsize + 8): "are there fp32 masters?",
                shared * (2 * itemsize + 12): "beside fp32 parameters there are none that are masters",
            },
            "gathered": {
                sent // itemsize: "these are elements: times `itemsize`",
                sent * 4 // itemsize: "an element has `itemsize` bytes, here 2",
                sum(units) * itemsize: "that is the whole model: units are freed after use",
                units[0] * itemsize: "that is what is whole at the end of backward: the most of all uses is asked",
                max(units) * itemsize: "that is the largest unit alone: what was sent for ahead is live too, a unit "
                "larger than the budget among them, where it flies alone",
            },
        }
        known = wrong[key]
        if budget and key == "gathered" and isinstance(mine, int):
            few = f"too few fly: a unit larger than the budget, {budget} elements, is sent for when nothing else flies"
            many = f"too many fly: at the first that does not fit into {budget} elements stop, and take none behind it"
            few, many = (f"{said}. Or is backward's order not the opposite of forward's?" for said in (few, many))
            known = {mine: few if mine < sent else many} | known
        why = f": {known[mine]}" if mine in known else ""
        raise Wrong(f"{mine} bytes {key}, counted {sent}{why}", *evidence)
