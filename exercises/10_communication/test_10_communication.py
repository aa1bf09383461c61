"""Grades chapter 10's functions of one rank: what is kept of a gradient, how it is packed, and three formulas."""

from typing import Any

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, close, equal, require
from refimpl.grading.exchange import numbers
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Largest, in_place, own_memory, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.grading.undefined import NoInteger

FP32, BF16 = torch.float32, torch.bfloat16


def pair(found: Any, names: str) -> tuple[Any, Any]:
    require(isinstance(found, tuple) and len(found) == 2, f"the result is no pair ({names})")
    first, second = found
    return first, second


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def other(known: dict[str, Tensor], expected: Tensor) -> dict[str, Tensor]:
    """Of well-known mistakes those that can be told from what is right."""
    return {s: t for s, t in known.items() if t.shape != expected.shape or not close(t, expected)}


def largest(x: Tensor, k: int) -> Tensor:
    return x.argsort(descending=True, stable=True)[:k].sort()[0]


@on_ranks(1)
def test_top_k(answer: Answer, group: WatchedGroup) -> None:
    for n, k, dtype in (
        (9, 3, FP32),
        (9, 3, BF16),
        (40, 1, BF16),
        (6, 6, FP32),
        (4, 7, BF16),
        (1, 1, FP32),
        (300, 41, FP32),
    ):
        error, truth = random(n, seed=n).round(), random(n, seed=n).round()
        for step in range(4):
            case(f"{n} elements, k = {k}, {dtype}, step {step}")
            # Whole numbers at first, of which many are equally large; then ones that bf16 has not.
            grad = (numbers(n, seed=step) if step < 2 else random(n, seed=step)).to(dtype)
            with untouched(grad=grad), in_place(error=error):
                values, indices = pair(answer.top_k(grad, error, k), "values, indices")
            truth = judge_top_k(values, indices, error, grad, truth, k)

    case("two sums that bf16 has not apart")
    grad, error = torch.tensor([0.0, 0.5, 1.0], dtype=BF16), torch.tensor([1.0, 0.0, 0.002])
    before = error.clone()
    values, indices = pair(answer.top_k(grad, error, 1), "values, indices")
    judge_top_k(values, indices, error, grad, before, 1)


def judge_top_k(values: Any, indices: Any, error: Tensor, grad: Tensor, before: Tensor, k: int) -> Tensor:
    """Raise Wrong unless these are sent and kept; returns the error as it should be."""
    whole = grad.float() + before
    chosen = largest(whole.abs(), k)
    known = {
        "the largest of grad alone: what earlier steps did not send is forgotten": largest(grad.float().abs(), k),
        "all that reach the k-th largest, of which the first k: a larger one behind them is lost": (
            (whole.abs() >= whole[chosen].abs().min()).nonzero().flatten()[:k]
        ),
        "the largest, not the largest in magnitude": largest(whole, k),
        "compared after they were rounded to 16 bits: grad + error is fp32": largest(whole.to(grad.dtype).abs(), k),
        "the first of them in order of size, not ascending": whole.abs().argsort(descending=True, stable=True)[:k],
        "of equally large ones the first are to be taken": (len(whole) - 1 - largest(whole.abs().flip(0), k)).sort()[0],
    }
    known = {s: t.int() for s, t in known.items()}
    if isinstance(indices, Tensor) and indices.shape == chosen.shape and indices.dtype in (torch.int32, torch.int64):
        inside = bool(((indices >= 0) & (indices < len(whole))).all())
        as_large = inside and torch.equal(*(whole[i.long()].abs().sort()[0] for i in (indices, chosen)))
        others = not torch.equal(indices.sort()[0].long(), chosen)
        require(not (as_large and others), "indices: of equally large ones the first are to be taken")
    if isinstance(indices, Tensor) and indices.dtype == torch.int64 and torch.equal(indices, chosen):
        raise Wrong("the indices are int64: as many bytes again travel for nothing, int32 is enough")
    equal(indices, chosen.int(), "indices", known={s: t for s, t in known.items() if not torch.equal(t, chosen.int())})
    sent = whole[chosen].to(grad.dtype)
    plain = {"of grad alone: the error is to be sent too": grad[chosen], "their magnitudes": whole[chosen].abs()}
    plain = {s: t.to(grad.dtype) for s, t in plain.items()}
    equal(values, sent, "values", known=other(plain, sent), rtol=0, atol=0)
    own_memory(values, "values", "they are sent and kept, so give them memory for k elements alone")
    own_memory(indices, "indices", "they are sent and kept, so give them memory for k elements alone")
    kept = whole.clone()
    kept[chosen] -= sent.float()
    zeroed = whole.index_fill(0, chosen, 0)
    wrong = {
        "it is as before: what was not sent must be added to it, in place": before,
        "zero where something was sent: but what was sent (or the sum before it) was rounded to 16 bits, and the rest "
        "is lost": zeroed,
        "without what was there before: it must not forget": grad.float().index_fill(0, chosen, 0),
        "all of grad + error: what was sent is sent once more": whole,
    }
    # In fp32 two orders of the same sums may differ in the last place.
    equal(error, kept, "the error", known=other(wrong, kept), rtol=0, atol=1e-6)
    return kept


@on_ranks(1)
def test_quantize_blocks(answer: Answer, group: WatchedGroup) -> None:
    for n, block, dtype in ((5, 2, FP32), (64, 16, BF16), (70, 16, FP32), (3, 8, BF16), (16, 1, FP32), (0, 4, FP32)):
        case(f"{n} elements, blocks of {block}, {dtype}")
        x = (random(n, seed=n) * torch.logspace(-3, 3, max(n, 1))[:n]).to(dtype)  # blocks of very different size
        if n > 4:
            x[:4] = torch.tensor([1.0, -2.0, 0.0, 0.0]).to(dtype)
        if n > 32:
            x[16:32] = 0
            x[32:48] *= 1e-12
        if n % block:
            x[n // block * block :] *= 1e-9  # what stands behind x must not count
        with untouched(x=x), Largest() as made, NoInteger():
            q, scales = pair(answer.quantize_blocks(x, block), "q, scales")
        judge_blocks(q, scales, x, block)
        room = max(-(-n // block) * block, 64)
        require(made.numel <= room, f"something of {made.numel:,} elements is made, x has {n:,} and blocks {room:,}")


def judge_blocks(q: Any, scales: Any, x: Tensor, block: int) -> None:
    n, count = len(x), -(-len(x) // block)
    rows = torch.zeros(count * block)
    rows[:n] = x
    rows = rows.view(count, block)
    expected = rows.abs().amax(1) / 127
    known = {
        "one scale for all: a block has its own": torch.full((count,), float(x.abs().max()) / 127 if n else 0.0),
        "the largest magnitude / 128: then 127 is not reached, or 128 does not fit": expected * 127 / 128,
        "the largest value, not the largest magnitude": rows.amax(1) / 127,
        "of the span from the least to the largest: 0 stays 0 here, so it is of magnitudes": (
            (rows.amax(1) - rows.amin(1)) / 254
        ),
        "divided in bf16: scales have 24 bits, not 8": (rows.abs().amax(1).bfloat16() / 127).float(),
        "padding that is no zero counts in the last one": torch.cat([expected[:-1], expected[-1:].clamp(min=1 / 127)]),
        "of a block of zeros is 1: nothing is wrong with 0": torch.where(expected > 0, expected, 1.0),
        "127 / the largest magnitude: x is q * scale": 127 / rows.abs().amax(1),
        "the largest magnitude / 127.5: then 127.5 is rounded to 128, which does not fit": expected * 127 / 127.5,
        "never below 1e-8: a block of smaller numbers becomes zeros": expected.clamp(min=1e-8),
    }
    if isinstance(scales, Tensor) and scales.shape == expected.shape and scales.dtype == BF16:
        raise Wrong("the scales are bf16: they are fp32, so that q * scale is at most half a scale away from x")
    equal(scales, expected, "the scales", known=other(known, expected), atol=0)
    require(isinstance(q, Tensor), f"q is {q!r}, expected a tensor")
    require(q.shape == x.shape, f"q has shape {tuple(q.shape)}, x has {tuple(x.shape)}: padding is not part of it")
    require(q.dtype == torch.int8, f"q has dtype {q.dtype}, expected int8: its bytes are the point")
    if not n:
        return
    by = expected.repeat_interleave(block)[:n]
    require(bool((q >= -127).all()), "q has -128: the range is -127 to 127, the same on both sides")
    zero = by == 0
    require(
        not bool(q[zero].any()), "q of a block of zeros is not 0: 0 / 0 is no number", f"  found {q[zero].tolist()[:8]}"
    )
    away = ((q.float() * by - x.float()).abs() / torch.where(zero, 1.0, by)).max().item()
    cut = torch.equal(q, (x.float() / torch.where(zero, 1.0, by)).to(torch.int8))
    require(not cut or away <= 0.501, "q is cut off towards zero: round() first, a cast to int8 does not")
    require(away <= 0.501, f"q * scale is up to {away:.3g} scales away from x, at most half a scale is right")


NIBBLES = ([1, -1, 7], [-8, 7, 0, -1], [], [-3], [0, 0, 0, 0, -8], list(range(-8, 8)))


def packed(q: list[int]) -> list[int]:
    low_high = [(v % 16) for v in q] + [0] * (len(q) % 2)
    return [a + 16 * b for a, b in zip(low_high[::2], low_high[1::2], strict=True)]


@on_ranks(1)
def test_pack_int4(answer: Answer, group: WatchedGroup) -> None:
    for values in NIBBLES:
        case(f"q {values}")
        q = torch.tensor(values, dtype=torch.int8)
        with untouched(q=q):
            found = answer.pack_int4(q)
        expected = torch.tensor(packed(values), dtype=torch.uint8)
        swapped = torch.tensor([v >> 4 | (v & 15) << 4 for v in packed(values)], dtype=torch.uint8)
        half = (len(values) + 1) // 2
        apart = packed([v for i in range(half) for v in (values[i], [*values, 0][half + i])])
        signed = [v + 8 if v else 8 for v in values] + [0] * (len(values) % 2)
        offset = [a + 16 * b for a, b in zip(signed[::2], signed[1::2], strict=True)]
        filled = [*signed[: len(values)], 8][: len(values) + len(values) % 2]
        all_offset = [a + 16 * b for a, b in zip(filled[::2], filled[1::2], strict=True)]
        known = {
            "the first of two stands in the high bits: it belongs into the low ones": swapped,
            "the first half of q in the low bits, the second in the high ones: neighbours share a byte": apart,
            "8 is added to each: the four bits are two's complement, -1 is 1111": offset,
            "-8 is lost: four bits hold -8 to 7": packed([max(v, -7) for v in values]),
            "a negative low one fills the high bits too: cut its eight bits down to four": [
                (a | b << 4) & 255 for a, b in zip(values[::2], [*values[1::2], 0], strict=False)
            ],
            "8 is added to each, and to the padding: four bits are two's complement, the rest 0": all_offset,
            "the last number stands in the high bits too: after an odd n they are 0": packed(
                values + values[-1:] * (len(values) % 2)
            ),
        }
        tensors = {s: torch.as_tensor(t, dtype=torch.uint8) for s, t in known.items()}
        if isinstance(found, Tensor) and found.shape == q.shape and len(q) > 1:
            raise Wrong(f"{len(q)} numbers take {len(found)} bytes: two are to stand in one")
        equal(
            found, expected, "what is packed", known={s: t for s, t in tensors.items() if not torch.equal(t, expected)}
        )


@on_ranks(1)
def test_unpack_int4(answer: Answer, group: WatchedGroup) -> None:
    for values in NIBBLES:
        case(f"n = {len(values)}, bytes {[hex(b) for b in packed(values)]}")
        bits = torch.tensor(packed(values), dtype=torch.uint8)
        with untouched(packed=bits):
            found = answer.unpack_int4(bits, len(values))
        expected = torch.tensor(values, dtype=torch.int8)
        whole = [*values, 0][: len(values) + len(values) % 2]
        swapped = [v for i in range(0, len(whole), 2) for v in whole[i : i + 2][::-1]][: len(values)]
        padded = isinstance(found, Tensor) and len(found) > len(values)
        require(not padded, f"{len(values) + 1} numbers, expected n = {len(values)}: the last one is padding")
        known = {
            "8 to 15 are the negative numbers": expected % 16,
            "8 is a negative number too, -8": torch.where(expected == -8, 8, expected),
            "high bits before low ones": torch.tensor(swapped, dtype=torch.int8),
        }
        equal(found, expected, "the numbers", known={s: t for s, t in known.items() if not torch.equal(t, expected)})
