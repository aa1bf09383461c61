"""Rotary positions: pairs of a head's numbers are turned by an angle that grows with the token's position.

(a, b) -> (a cos - b sin, b cos + a sin). Forward moves 2 n b bytes for n numbers of b bytes (read x, write y) and
T R c for a table of T positions and R angles, read once for all heads of a token; backward is the same with -sin. Six
FLOPs a pair: the memory is the limit. `interleaved`: pairs (0, 1), (2, 3), ... as in the paper and GPT-J; otherwise
(0, R), (1, R + 1), ... as in Llama and Hugging Face. Numbers beyond the 2 R that are turned are copied.
Su et al. 2021, arXiv:2104.09864, section 3.2. DeepSpeed's file:
csrc/transformer/inference/csrc/apply_rotary_pos_emb.cu.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import floating, one_device
from refimpl.kernels.language import on, once_differentiable, takes, tl, triton
from refimpl.kernels.tiles import next_power_of_2

ELEMENTS = 4096  # numbers that a program turns


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [B, H, T, D], cos and sin [T, R] or [B, T, R] with 2 R <= D -> [B, H, T, D] in x's dtype, computed in fp32.

    Any strides: pass `q.transpose(1, 2)` of a [B, T, H, D] tensor as it is. The tables get no gradient. Raises
    TypeError for a dtype that is no float, ValueError for sizes or devices that do not fit.
    """
    floating("rotary", x=x, cos=cos, sin=sin)
    one_device("rotary", x=x, cos=cos, sin=sin)
    if x.dim() != 4:
        raise ValueError(f"rotary: x must be [B, H, T, D], not {list(x.shape)}")
    batch, _, length, width = x.shape
    angles = cos.shape[-1] if cos.dim() else 0
    fits = cos.shape in ((length, angles), (batch, length, angles)) and 2 * angles <= width
    if not fits or cos.shape != sin.shape:
        tables = f"[{length}, R] or [{batch}, {length}, R] with R at most {width // 2}"
        raise ValueError(f"rotary: cos {list(cos.shape)} and sin {list(sin.shape)} must be {tables}")
    if x.numel() == 0 or angles == 0 or not takes(x, cos, sin):
        return reference(x, cos, sin, interleaved)
    with on(x):
        y: Tensor = Rotary.apply(x, cos.detach(), sin.detach(), interleaved)  # type: ignore[no-untyped-call]
        return y


def reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same by torch's operators."""
    angles = cos.shape[-1]
    c, s = (t.detach() if t.dim() == 2 else t.detach()[:, None] for t in (cos, sin))  # [T, R] or [B, 1, T, R]
    if x.dtype != torch.float64:
        c, s = c.float(), s.float()
    turned, rest = x[..., : 2 * angles].to(c.dtype), x[..., 2 * angles :]
    pairs = turned.view(*turned.shape[:-1], *((angles, 2) if interleaved else (2, angles)))
    a, b = pairs.unbind(-1 if interleaved else -2)
    both = torch.stack((a * c - b * s, b * c + a * s), -1 if interleaved else -2).flatten(-2)
    return torch.cat((both.to(x.dtype), rest), -1)


@triton.jit
def kernel(
    x, cos, sin, y, heads, length, width, angles,
    x_b: tl.int64, x_h: tl.int64, x_t: tl.int64, y_b: tl.int64, y_h: tl.int64, y_t: tl.int64,
    c_b: tl.int64, c_t: tl.int64, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A program turns HEADS heads of one token. sign -1 turns back: the gradient."""
    batch, place = tl.program_id(0) // length, tl.program_id(0) % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [H, 1]
    angle = tl.arange(0, HALF)
    c = tl.load(cos + batch * c_b + place * c_t + angle, angle < angles, 0.0).to(tl.float32)[None, :]
    s = tl.load(sin + batch * c_b + place * c_t + angle, angle < angles, 0.0).to(tl.float32)[None, :] * sign
    at = x + batch * x_b + head * x_h + place * x_t
    at_y = y + batch * y_b + head * y_h + place * y_t
    if INTERLEAVED:  # both of a pair in one load, then apart
        col = tl.arange(0, 2 * HALF)[None, :]
        mask = (head < heads) & (col < 2 * angles)
        pairs = tl.load(at + col, mask, 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (HEADS, HALF, 2)))
        both = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (HEADS, 2 * HALF))
        tl.store(at_y + col, both.to(y.dtype.element_ty), mask)
    else:
        mask = (head < heads) & (angle < angles)[None, :]
        a = tl.load(at + angle[None, :], mask, 0.0).to(tl.float32)
        b = tl.load(at + angles + angle[None, :], mask, 0.0).to(tl.float32)
        tl.store(at_y + angle[None, :], (a * c - b * s).to(y.dtype.element_ty), mask)
        tl.store(at_y + angles + angle[None, :], (b * c + a * s).to(y.dtype.element_ty), mask)
    if REST > 0:
        col = 2 * angles + tl.arange(0, REST)[None, :]
        mask = (head < heads) & (col < width)
        tl.store(at_y + col, tl.load(at + col, mask, 0.0), mask)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """x [B, H, T, D] turned by the angles, forward (1) or back (-1); laid out as x is."""
    x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
    cos, sin = (t.contiguous() for t in (cos, sin))
    batch, heads, length, width = x.shape
    angles = cos.shape[-1]
    y = torch.empty_like(x)
    if y.stride(3) != 1 and width > 1:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half, rest = next_power_of_2(angles), width - 2 * angles
    high = max(1, min(next_power_of_2(heads), ELEMENTS // (2 * half)))
    kernel[(batch * length, triton.cdiv(heads, high))](
        x, cos, sin, y, heads, length, width, angles, *x.stride()[:3], *y.stride()[:3],
        length * angles if cos.dim() == 3 else 0, angles, sign,
        HEADS=high, HALF=half, REST=next_power_of_2(rest) if rest else 0, INTERLEAVED=interleaved,
        num_warps=min(max(high * half // 256, 1), 8),
    )  # fmt: skip
    return y


class Rotary(torch.autograd.Function):
    """The kernel as one operation of autograd; it keeps the tables, not x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return turn(x, cos, sin, interleaved, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, sin, ctx.interleaved, -1), None, None, None


def _case(b: int, h: int, t: int, d: int, interleaved: bool, dtype: torch.dtype = torch.bfloat16) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(b, t, h, d, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        angles = torch.arange(t, device=device)[:, None] * 10000 ** (-torch.arange(0, d, 2, device=device) / d)
        return x, angles.cos(), angles.sin(), interleaved

    moved = 2 * b * h * t * d * dtype.itemsize + 2 * b * t * d // 2 * 4
    kind = " interleaved" if interleaved else ""
    return Case(f"rotary {short(dtype)} {b}x{h}x{t}x{d}{kind}", rotary, reference, inputs, moved, moved)


CASES = (_case(4, 32, 4096, 128, False), _case(4, 32, 4096, 128, True))
SMALL = (_case(2, 8, 1024, 64, False, torch.float32),)
