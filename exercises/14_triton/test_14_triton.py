"""Grades chapter 14's kernels over elements and rows: against float64, and by the bytes that their programs move."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

from refimpl.grading.compare import equal, require, rounded_once
from refimpl.grading.grade import on_ranks
from refimpl.grading.kernels import bytes_of, launch, moved, no_larger, sectors, times, within
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

INF = float("inf")
SHAPES = [  # rows, cols, BLOCK, elements between rows beyond cols, dtype
    (3, 70, 32, 0, torch.float32),
    (2, 64, 64, 5, torch.float32),
    (4, 9, 16, 3, torch.float16),
    (5, 150, 64, 1, torch.float16),
    (1, 1, 16, 0, torch.float32),
]
HALF_BOUND = {"rtol": 1e-3, "atol": 1e-6}  # a unit in fp16's last place
FALLING = "infinite where a block's maximum is below those before it: the maximum so far is the larger of the two"
ROUND = "make values fp32 where they are loaded, and let tl.store alone round"


def bound(dtype: torch.dtype) -> dict[str, float]:
    """One rounding to the dtype, and a few in fp32."""
    return HALF_BOUND if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-6}


def shapes(whole_row: bool = False) -> Iterator[tuple[int, int, int, int, torch.dtype]]:
    """SHAPES, each named in the report; `whole_row`: with blocks that hold a row."""
    for rows, cols, block, more, dtype in SHAPES:
        block = max(block, 1 << (cols - 1).bit_length()) if whole_row else block
        case(f"{rows} x {cols} {str(dtype)[6:]}, rows {cols + more} elements apart, BLOCK = {block}")
        torch.manual_seed(rows)
        yield rows, cols, block, cols + more, dtype


def blank(like: Tensor, stride: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    return within(torch.full(like.shape, float("nan"), dtype=dtype or like.dtype), stride)


@on_ranks(1)
def test_swiglu_kernel(answer: Answer, group: WatchedGroup) -> None:
    for rows, cols, block, stride, dtype in shapes():
        both = torch.randn(rows, 2 * cols).to(dtype) * 3
        both[-1, 0] = 100.0  # exp of it is infinite
        both[0, [0, cols]] = torch.tensor([-16.0, 20000.0], dtype=dtype)  # silu(-16) is rounded far in fp16
        both = within(both, 2 * stride)
        gate, up = both[:, :cols], both[:, cols:]
        if stride > cols:  # not halves of one matrix
            up = within(up.clone(), stride)
        out = blank(gate, stride)
        with untouched(gate_ptr=gate, up_ptr=up):
            grid, strides = (rows, -(-cols // block)), (gate.stride(0), up.stride(0), stride)
            c = launch(answer.swiglu_kernel, grid, gate, up, out, cols, *strides, BLOCK=block)
        g, u = gate.double(), up.double()
        known = {
            "exp(gate) overflows, exp(-gate) does not: x / (1 + exp(-x))": torch.where(
                gate == 100, float("nan"), silu(g) * u
            ).to(dtype),
            "gate and up have changed places": (g * silu(u)).to(dtype),
            "silu is missing: this is gate * up": (g * u).to(dtype),
            "this is sigmoid(gate) * up, silu is x * sigmoid(x)": (g.sigmoid() * u).to(dtype),
        }
        equal(out, (silu(g) * u).to(dtype), "out", known=known, **bound(dtype))
        rounded_once(out, silu(g) * u, "out", ROUND)
        moved(c, bytes_of(gate=gate, up=up), bytes_of(out=out))


@on_ranks(1)
def test_transpose_kernel(answer: Answer, group: WatchedGroup) -> None:
    for rows, cols, more in ((32, 48, 0), (19, 33, 7), (1, 5, 0)):
        case(f"{rows} x {cols}, rows {cols + more} and {rows + more} elements apart, BLOCK = 16")
        x = within(torch.randn(rows, cols), cols + more)
        out = blank(x.t(), rows + more)
        grid = (-(-rows // 16), -(-cols // 16))
        with untouched(x_ptr=x):
            c = launch(answer.transpose_kernel, grid, x, out, rows, cols, cols + more, rows + more, BLOCK=16)
        halved = {"elements are rounded to 16 bits on the way: they move as they are": x.t().half().float()}
        equal(out, x.t().contiguous(), "out", known=halved, rtol=0, atol=0)
        moved(c, bytes_of(x=x), bytes_of(out=out))
        if not more and rows > 1:
            advice = "neighbours in one access, a tile at once; by columns each element costs a sector of 32 bytes"
            for name in ("x_ptr", "out_ptr"):
                sectors(c, name, x.numel() * 4, advice)


@on_ranks(1)
def test_softmax_kernel(answer: Answer, group: WatchedGroup) -> None:
    for rows, cols, block, stride, dtype in shapes(whole_row=True):
        x = torch.randn(rows, cols) * 4
        x[0, -1] = 1000.0  # exp of it overflows, less the first of the row too
        if cols > 2:
            x[-1, 1] = -INF
            x[rows // 2] -= 20000.0  # a row far below 0: lanes beyond it must not be its maximum
        x = within(x.to(dtype), stride)
        out = blank(x, cols + 2)
        with untouched(x_ptr=x):
            c = launch(answer.softmax_kernel, (rows,), x, out, cols, stride, cols + 2, BLOCK=block)
        z = x.double()
        big = z.float().exp()
        padded = torch.cat([z, z.new_zeros(rows, block - cols)], 1)
        known = {
            "lanes beyond the row count as 0 in the maximum or the sum: give them -inf": (
                padded.softmax(1)[:, :cols].to(dtype)
            ),
            "an exponential overflows: subtract the row's maximum first": (big / big.sum(1, True)).to(dtype),
            "powers of 2: exp2(x) is exp(x log 2)": (z * math.log(2)).softmax(1).to(dtype),
            "this is the logarithm of the softmax": z.log_softmax(1).to(dtype),
            "an exponential overflows: subtract the row's maximum, any other element may lie far below it": (
                (f := (z - z[:, :1]).float().exp()) / f.sum(1, True)
            ).to(dtype),
            "exp(x - lse) has lse's rounding, large for a large lse: subtract the maximum, divide by the sum": (
                (x.float() - x.float().logsumexp(1, True)).exp().to(dtype)
            ),
        }
        equal(out, z.softmax(1).to(dtype), "out", known=known, **bound(dtype))
        rounded_once(out, z.softmax(1), "out", ROUND)
        require(not out[z == -INF].any(), "an element of -inf must become 0, and no small number")
        advice = "keep the row in the program after the first load"
        moved(c, bytes_of(x=x), bytes_of(out=out), advice=advice)


@on_ranks(1)
def test_logsumexp_kernel(answer: Answer, group: WatchedGroup) -> None:
    for rows, cols, block, stride, dtype in shapes():
        x = torch.randn(rows, cols) * 3
        x[0] = x[0].sort().values * 40  # the maximum grows from block to block, far above what exp can take
        x[rows // 2] -= 20000.0 if dtype == torch.float16 else 1e38  # no number is low enough to begin with
        if rows > 3:
            x[3] = x[3].sort(descending=True).values * 40  # and falls
        if cols > block:
            x[-1, :block] = -INF
        x = within(x.to(dtype), stride)
        out = blank(x[:, 0], dtype=torch.float32)
        with untouched(x_ptr=x):
            c = launch(answer.logsumexp_kernel, (rows,), x, out, cols, stride, BLOCK=block)
        top, whole = x.double().amax(1, True), x[:, : cols // block * block].double()
        known = {
            "the sum so far is not rescaled when the maximum grows": unscaled(x, block),
            "this is the maximum: the sum is missing": x.float().amax(1),
            "the logarithm of the sum is missing": (top + (x.double() - top).exp().sum(1, True)).float()[:, 0],
            "the maximum was subtracted, and is missing": (x.double() - top).logsumexp(1).float(),
            "the last block, which is not full, is left out": whole.logsumexp(1).float(),
        }
        require(
            not (cols > block and out[-1].isnan() and out[:-1].isfinite().all()),
            "out has NaN where a row's first block is all -inf: -inf less -inf",
        )
        require(not (out == -INF).any(), "out is -inf where a row lies far below 0: the maximum so far begins at -inf")
        require(not (out == INF).any() or not out[0].isfinite(), f"out is {FALLING}")
        equal(out, x.double().logsumexp(1).float(), "out", known=known, rtol=1e-5, atol=1e-5)
        advice = "one pass: maximum and sum go together"
        moved(c, bytes_of(x=x), bytes_of(out=out), advice=advice)
        no_larger(c, block, "a row may be any length, so go through it BLOCK elements at a time")


def unscaled(x: Tensor, block: int) -> Tensor:
    """logsumexp by blocks, where each block is relative to the maximum so far, and stays so."""
    tops = x.double().cummax(1).values
    total = x.new_zeros(len(x), dtype=torch.float64)
    for start in range(0, x.shape[1], block):
        part = x[:, start : start + block].double()
        total += (part - tops[:, [min(start + block, x.shape[1]) - 1]]).exp().nansum(1)
    return (tops[:, -1] + total.log()).float()


@on_ranks(1)
def test_rms_norm_kernel(answer: Answer, group: WatchedGroup) -> None:
    for rows, cols, block, _, dtype in shapes(whole_row=True):
        # Elements of about 0.25 and eps = 0.5: where eps stands makes a difference. Else squares overflow in 16 bits.
        small = cols in (1, 64)
        values = torch.rand(2, rows, cols) / 4 + 0.125 if small else torch.randn(2, rows, cols) * 200
        eps = 0.5 if small else 1e-5
        x, residual = (within(t.to(dtype)) for t in values)
        weight, out, before = within((1 + torch.rand(cols)).to(dtype)), blank(x), residual.clone()
        s = x.double() + before.double()
        with untouched(x_ptr=x, weight_ptr=weight):
            c = launch(answer.rms_norm_kernel, (rows,), x, residual, weight, out, cols, eps, BLOCK=block)
        mean = s.square().mean(1, True)

        def normed(scale: Tensor, s: Tensor = s, weight: Tensor = weight, dtype: torch.dtype = dtype) -> Tensor:
            return (s * scale * weight.double()).to(dtype)

        known = {
            "the mean is over BLOCK lanes, not over cols": normed((mean * cols / block + eps).rsqrt()),
            "the squares are added up, and not divided by cols": normed((mean * cols + eps).rsqrt()),
            "eps belongs under the root, added to the mean": normed(1 / (mean.sqrt() + eps)),
            "eps is missing": normed(mean.rsqrt()),
            "eps is added to the mean as it is, not `cols` times": normed((mean + eps * cols).rsqrt()),
            "eps is added to the mean, not to the sum before it is divided": normed((mean + eps / cols).rsqrt()),
            "the mean is subtracted, as in LayerNorm: RMSNorm does not": normed(
                ((s - s.mean(1, True)).square().mean(1, True) + eps).rsqrt(), s - s.mean(1, True)
            ),
            "the residual is not added": normed((x.double().square().mean(1, True) + eps).rsqrt(), x.double()),
            "squares overflow in 16 bits: make the sum fp32 first": torch.zeros_like(out),
        }
        equal(out, normed((mean + eps).rsqrt()), "out", known=known, **bound(dtype))
        rounded_once(out, s * (mean + eps).rsqrt() * weight.double(), "out", ROUND)
        same = {"residual keeps its old values: s must be stored over it": before}
        equal(residual, s.to(dtype), "residual", known=same, **bound(dtype))
        every = bytes_of(x=x, residual=residual, weight=weight)
        moved(c, times(every, weight=rows), bytes_of(residual=residual, out=out), advice="the program still has it")


@on_ranks(1)
def test_cross_entropy_kernel(answer: Answer, group: WatchedGroup) -> None:
    for rows, cols, block, stride, dtype in shapes():
        ignore = {2: 1, 4: -1}.get(rows, -100)
        logits = torch.randn(rows, cols) * 5
        logits[0] += 300 if dtype == torch.float32 else 30
        logits[2:] -= 200  # exp of it is 0 unless the maximum is subtracted
        if rows > 3:
            logits[3] = logits[3].sort(descending=True).values * 20 + 4000  # the maximum falls from block to block
        target = within(torch.randint(cols, (rows,)))
        if rows > 1:
            target[1] = ignore
            logits[1] = float("nan")
        logits = within(logits.to(dtype), stride)
        z, counts, loss = logits.double(), target != ignore, blank(target, dtype=torch.float32)
        with untouched(target_ptr=target):
            c = launch(
                answer.cross_entropy_kernel, (rows,), logits, target, loss, cols, stride, ignore, 0.125, BLOCK=block
            )
        lse = z.logsumexp(1)
        place = target.clamp(min=0).unsqueeze(1)
        wanted = torch.where(counts, lse - z.gather(1, place).squeeze(1), 0.0)
        hot = torch.zeros_like(z).scatter_(1, place, 1.0)
        gradient = torch.where(counts.unsqueeze(1), 0.125 * (z.softmax(1) - hot), 0.0)
        require(
            not logits[~counts].isnan().any() and not loss[~counts].isnan().any(),
            "a row whose target is ignore_index must become 0, in loss and gradient, whatever its logits are",
        )
        require(not (loss[3:4] == INF).any() or not loss[0].isfinite(), f"the loss is {FALLING}")
        others = {
            "a row whose target is ignore_index has a loss: it counts nothing": lse.float(),
            "scale is for the gradient alone": 0.125 * wanted.float(),
            "the target's logit is read when its gradient lies there: read it before": torch.where(
                counts, lse - gradient.gather(1, place).squeeze(1), 0.0
            ).float(),
        }
        equal(loss, wanted.float(), "loss", known=others, rtol=1e-5, atol=3e-5)
        plain = torch.where(counts.unsqueeze(1), 0.125 * z.softmax(1), 0.0)
        known = {
            "this is the softmax: 1 at the target is not subtracted": plain.to(dtype),
            "scale is missing": (8 * gradient).to(dtype),
            "1 is subtracted at the target after scaling: scale it too": (plain - hot * counts.unsqueeze(1)).to(dtype),
        }
        rough = {"rtol": 2e-3, "atol": 1e-5} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-6}
        equal(logits, gradient.to(dtype), "the gradient, in logits", known=known, **rough)
        size, used = logits.element_size(), int(counts.sum())
        moved(
            c,
            {"logits_ptr": 2 * used * cols * size, **bytes_of(target=target)},
            {"logits_ptr": rows * cols * size, **bytes_of(loss=loss)},
            optional={"logits_ptr": used * size, "target_ptr": rows * 8},
            advice="two loads: maximum and sum in one pass, the gradient in the other; none of an ignored row",
        )
        no_larger(c, block, "a row may be any length, so go through it BLOCK elements at a time")
