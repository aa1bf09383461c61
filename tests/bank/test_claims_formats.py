"""What cards claim of 8- and 4-bit numbers with a scale for each block."""

import math

import torch
from torch import Tensor

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # E2M1's magnitudes


def scales(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x [R, C] -> the largest magnitude of each block, where its elements are [R, C]"""
    (r, c), (R, C) = block, x.shape
    largest = x.abs().view(R // r, r, C // c, c).amax(dim=(1, 3))
    return largest.repeat_interleave(r, 0).repeat_interleave(c, 1)


def mxfp8(x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """-> the rounded numbers, their scales: powers of two, as in MXFP8."""
    scale = torch.exp2((scales(x, block) / 448).log2().ceil())
    return (x / scale).to(torch.float8_e4m3fn).float() * scale, scale


def nearest(x: Tensor) -> Tensor:
    middles = (FP4[1:] + FP4[:-1]) / 2
    return FP4[torch.bucketize(x.abs(), middles)] * x.sign()


def by_chance(x: Tensor) -> Tensor:
    """Up with the probability of the fraction."""
    above = torch.bucketize(x.abs(), FP4).clamp(1, len(FP4) - 1)
    low, high = FP4[above - 1], FP4[above]
    return torch.where(torch.rand_like(x) < (x.abs() - low) / (high - low), high, low) * x.sign()


def fp4(x: Tensor, block: tuple[int, int]) -> Tensor:
    """With E4M3's scales, as in NVFP4."""
    scale = (scales(x, block) / 6).to(torch.float8_e4m3fn).float()
    return nearest(x / scale) * scale


def test_blocks_along_rows_are_no_blocks_along_columns() -> None:
    torch.manual_seed(0)
    w = torch.randn(64, 64)
    rows, scale = mxfp8(w, (1, 32))
    assert (scale.view(2, 32, 64).amin(1) < scale.view(2, 32, 64).amax(1)).float().mean() > 0.9
    columns, _ = mxfp8(w, (32, 1))
    assert torch.equal(rows, columns), "powers of two change no mantissa"
    small = w.clone()
    small[:, 0] *= 2.0**12  # an outlier in each row: its neighbours fall below E4M3's least numbers
    assert not torch.equal(mxfp8(small, (1, 32))[0], mxfp8(small, (32, 1))[0])
    assert (fp4(w, (1, 16)) != fp4(w, (16, 1))).float().mean() > 0.5
    assert torch.equal(fp4(w, (16, 16)), fp4(w.T.contiguous(), (16, 16)).T)


def test_fp4_rounded_by_chance_is_right_on_the_mean_and_twice_as_far_off() -> None:
    torch.manual_seed(0)
    x = torch.rand(64) * 12 - 6
    draws = by_chance(x.expand(4000, 64))
    assert (draws.mean(0) - x).abs().max() < 0.1
    assert (nearest(x) - x).abs().max() > 0.5
    many = torch.rand(1 << 16) * 12 - 6
    ratio = (by_chance(many) - many).square().mean() / (nearest(many) - many).square().mean()
    assert math.isclose(ratio.item(), 2, rel_tol=0.05)


def test_a_hadamard_transform_shares_an_outlier_out() -> None:
    h = torch.ones(1, 1)
    while len(h) < 16:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    h /= 4
    torch.testing.assert_close(h @ h.T, torch.eye(16))
    x, y = torch.zeros(16), torch.randn(16)
    x[3] = 16.0
    assert (x @ h).abs().tolist() == [4.0] * 16
    torch.testing.assert_close((x @ h) @ (y @ h), x @ y)  # the product that the two are for
