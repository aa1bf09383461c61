"""Grades chapter 10's sums of what is compressed: values at indices, and integers with scales of their own."""

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, close, equal, require
from refimpl.grading.exchange import numbers
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic

FP32, BF16 = torch.float32, torch.bfloat16


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def other(known: dict[str, Tensor], expected: Tensor) -> dict[str, Tensor]:
    """Of well-known mistakes those that can be told from what is right."""
    return {s: t for s, t in known.items() if t.shape != expected.shape or not close(t, expected)}


def quantized(chunk: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """A chunk's integers and scales, in the plainest way."""
    q, scales = torch.zeros(len(chunk)), []
    for start in range(0, len(chunk), block):
        part = chunk[start : start + block].float()
        scales.append(part.abs().max() / 127)
        q[start : start + block] = (part / scales[-1]).round() if scales[-1] else 0
    return q, torch.stack(scales)


@on_ranks(2, 3, 4)
def test_sparse_mean(answer: Answer, group: WatchedGroup) -> None:
    for n, k, dtype in ((3, 1, FP32), (20, 6, BF16), (5, 5, FP32), (400, 3, FP32)):
        case(f"{k} of {n} elements a rank, {dtype}, some of them on several ranks")
        every = []
        for rank in range(group.size):
            places = torch.randperm(n, generator=torch.Generator().manual_seed(rank if k > 1 else 0))[:k].sort()[0]
            every.append((numbers(k, seed=9 + rank, dtype=dtype) + 4, places.int()))
        values, indices = every[group.rank]
        with untouched(values=values, indices=indices):
            found = answer.sparse_mean(values, indices, n, group)
        each = [torch.zeros(n).index_copy(0, i.long(), v.float()) for v, i in every]
        total = torch.stack(each).sum(0)
        last, holders = torch.zeros(n), torch.stack([(t != 0).float() for t in each]).sum(0)
        for v, i in every:
            last[i.long()] = v.float()
        known = {
            "of several ranks' values for one element only one counts: they must be added, and out[i] += does not": (
                last / group.size
            ),
            "divided by the ranks that sent an element: the others have 0 there": total / holders.clamp(min=1),
            "this rank's alone": each[group.rank],
            "divided before it is sent, which rounds in bf16: divide the sum, in fp32": torch.stack(
                [torch.zeros(n).index_copy(0, i.long(), (v / group.size).float()) for v, i in every]
            ).sum(0),
        }
        expected = total / group.size
        equal(found, expected, "the mean", ranks=group.size, known=other(known, expected))
        judge_sparse_traffic(group, values, indices)
    case("bf16 values whose sum bf16 has not")
    values, indices = torch.full((1,), 256.0 if group.rank == 0 else 1.0, dtype=BF16), torch.zeros(1, dtype=torch.int32)
    found = answer.sparse_mean(values, indices, 2, group)
    expected = torch.tensor([255.0 + group.size, 0.0]) / group.size
    known = {"added in bf16, where 256 + 1 is 256": torch.tensor([256.0, 0.0]) / group.size}
    equal(found, expected, "the mean", known=known)
    case(ORDER)
    values, indices = odd_ones(group.size, group.rank), torch.arange(3, dtype=torch.int32)
    found = answer.sparse_mean(values, indices, 3, group)
    equal(found, in_rank_order(group.size) / group.size, "the mean (added in fp32, in rank order)")


ORDER = "numbers whose sum depends on the order: 1 and 1e8 on rank 0, 1e8 and -1e8 on rank 1, -1e8 and 1 on the last"


def odd_ones(ranks: int, rank: int) -> Tensor:
    return torch.tensor([2.0, *{0: (1.0, 1e8), 1: (1e8, -1e8), ranks - 1: (-1e8, 1.0)}.get(rank, (0.0, 0.0))])


def in_rank_order(ranks: int) -> Tensor:
    total = torch.zeros(3)
    for rank in range(ranks):
        total += odd_ones(ranks, rank)
    return total


def judge_sparse_traffic(group: WatchedGroup, values: Tensor, indices: Tensor) -> None:
    oracle, sent = group.oracle(), group.ledger.sent_bytes()
    for x in (values, indices):
        oracle.all_gather(x.new_empty(group.size * len(x)), x)
    total, right = sum(sent.values()), sum(oracle.ledger.sent_bytes().values())
    if "all_reduce" in sent:
        raise Wrong(f"a dense vector is all-reduced: {total:,} bytes leave this rank, {right:,} for what is not zero")
    wide = values.dtype == BF16 and total - right == len(values) * 2 * (group.size - 1)
    require(not wide, f"values travel as fp32, {total:,} bytes leave this rank, {right:,} are enough: send their dtype")
    same_traffic(group, oracle, "sparse_mean", itemsize=4)
    group.ledger.reset()


@on_ranks(2, 3, 4)
def test_quantized_reduce_scatter(answer: Answer, group: WatchedGroup) -> None:
    for size, block, dtype in ((8, 4, FP32), (10, 4, BF16), (3, 16, FP32), (33, 8, FP32)):
        n = group.size * size
        case(f"{n} elements, blocks of {block}, {dtype}")
        every = [(random(n, seed=rank) * 10.0**rank).to(dtype) for rank in range(group.size)]
        every[-1][:block] = 0  # a block of zeros
        x = every[group.rank]
        with untouched(x=x):
            found = answer.quantized_reduce_scatter(x, block, group)
        mine = [quantized(part.chunk(group.size)[group.rank], block) for part in every]
        spread = [scales.repeat_interleave(block)[:size] for _, scales in mine]
        expected = sum((q * by for (q, _), by in zip(mine, spread, strict=True)), torch.zeros(size))
        exact = sum((part.chunk(group.size)[group.rank].float() for part in every), torch.zeros(size))
        integers = sum((q for q, _ in mine), torch.zeros(size))
        mean_scale = torch.stack(spread).mean(0)
        unrounded = expected - mine[group.rank][0] * spread[group.rank]
        unrounded += every[group.rank].chunk(group.size)[group.rank].float()
        crossing = torch.zeros(size)
        for part in every:
            q, scales = quantized(part, block)
            at = group.rank * size
            crossing += q[at : at + size] * scales[at // block :].repeat_interleave(block)[:size]
        known = {
            "blocks begin in one rank's chunk and end in the next: each chunk is quantised by itself": crossing,
            "integers with different scales were added: multiply each by its own scale first": integers
            * spread[group.rank],
            "integers with different scales were added, and multiplied by the mean scale": integers * mean_scale,
            "integers were added as int8, which ends at 127": integers.to(torch.int8).float() * spread[group.rank],
            "not quantised: the exact sum": exact,
            "this rank's own chunk is not quantised": unrounded,
        }
        judge_reduced_traffic(group, x, block)
        equal(found, expected, "the sum", ranks=group.size, known=other(known, expected), rtol=1e-4, atol=1e-4)
    case(ORDER)
    found = answer.quantized_reduce_scatter(odd_ones(group.size, group.rank).repeat(group.size), 1, group)
    equal(found, in_rank_order(group.size), "the sum (added in fp32, in rank order)", rtol=1e-3)


def judge_reduced_traffic(group: WatchedGroup, x: Tensor, block: int) -> None:
    """Raise Wrong unless int8 and the scales of each chunk's blocks were exchanged, once."""
    oracle, sent, n = group.oracle(), group.ledger.sent_bytes(), len(x)
    count = group.size * -(-n // group.size // block)
    for out in (torch.zeros(n, dtype=torch.int8), torch.zeros(count)):
        oracle.all_to_all(torch.empty_like(out), out)
    extra = {"all_reduce", "reduce_scatter"} & set(sent)
    require(not extra, f"{', '.join(extra)} adds on the way, and integers with different scales cannot be added")
    away, total = n * (group.size - 1) // group.size, sum(sent.values())
    if sent.get("all_gather"):
        raise Wrong(f"every rank gets all chunks ({total:,} bytes leave this one): each needs its own, by all_to_all")
    said = f"{total:,} bytes leave this rank for {away:,} elements of others: is it dequantised before it travels?"
    require(group.ledger.calls() != {"all_to_all": 1} or total not in (2 * away, 4 * away), said)
    low = total - sum(oracle.ledger.sent_bytes().values()) == -2 * count * (group.size - 1) // group.size
    require(not low, "the scales travel as 16 bits: they are fp32, so that q * scale is half a scale from x at most")
    same_traffic(group, oracle, "quantized_reduce_scatter")
    group.ledger.reset()
