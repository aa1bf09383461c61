"""What cards claim of compressed gradients: codes, scales, squares, 16 bits, and when it pays."""

import math

import pytest
import torch
from worlds import run

from refimpl.comm.group import Group
from refimpl.compress.blocks import Blocks
from refimpl.compress.compressor import Compressor
from refimpl.compress.exchange import Served
from refimpl.compress.feedback import ErrorFeedback
from refimpl.compress.sign import Sign


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [32, 256])
def test_a_scale_for_each_block_is_4_bytes_beside_its_codes(bits: int, block: int) -> None:
    n = 3 * block
    wire = Blocks(bits, block).compress(torch.randn(n))
    assert sum(part.nbytes for part in wire) / n == bits / 8 + 4 / block


def test_codes_of_different_scales_have_no_sum() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(512) * size for size in (0.1, 1.0, 20.0)]
    wires = [Blocks(8, block=64).compress(g) for g in grads]
    truth = torch.stack(grads).sum(0)
    codes = torch.stack([codes.int() for _, codes in wires]).sum(0)
    scale = torch.stack([scales for scales, _ in wires]).mean(0).repeat_interleave(64)
    right = torch.stack([Blocks(8, block=64).decompress(wire, 512) for wire in wires]).sum(0)
    assert (right - truth).norm() < 0.02 * truth.norm()
    assert (codes * scale - truth).norm() > 0.2 * truth.norm()
    assert codes.abs().max() > 127


def test_the_mean_magnitude_is_the_best_scale_of_signs() -> None:
    torch.manual_seed(1)
    for x in (torch.randn(10_000), torch.randn(500).exp(), torch.zeros(9).index_fill(0, torch.tensor(3), 5.0)):
        best = x.abs().mean()

        def left(scale: torch.Tensor, x: torch.Tensor = x) -> float:
            signs = torch.where(x >= 0, 1.0, -1.0)
            return float((x - scale * signs).square().sum() / x.square().sum())

        assert all(left(best) <= left(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
        assert left(best) < 1
        if len(x) == 10_000:
            assert math.isclose(left(best), 1 - 2 / math.pi, abs_tol=0.01)
            assert math.isclose(left(x.square().mean().sqrt()), 2 - 2 * math.sqrt(2 / math.pi), abs_tol=0.01)
        if len(x) == 9:
            assert left(x.square().mean().sqrt()) > 1  # no contraction


def variances(compressor: Compressor | None) -> torch.Tensor:
    """Adam's v after 50 steps with gradients of very different sizes."""
    torch.manual_seed(2)
    weight, sizes = torch.nn.Parameter(torch.zeros(256)), torch.logspace(-3, 0, 256)
    adam = torch.optim.Adam([weight])
    feedback = ErrorFeedback(compressor, 256) if compressor else None
    for _ in range(50):
        weight.grad = torch.randn(256) * sizes
        if feedback is not None and compressor is not None:
            weight.grad = compressor.decompress(feedback.compress(weight.grad), 256)
        adam.step()
    found: torch.Tensor = adam.state[weight]["exp_avg_sq"]
    return found


def test_adam_on_one_bit_has_one_variance() -> None:
    assert variances(Sign()).unique().numel() == 1
    plain = variances(None)
    assert plain.max() > 1000 * plain.min()


def test_a_mean_of_bf16_weights_loses_a_small_step() -> None:
    torch.manual_seed(3)
    start = torch.randn(1000).bfloat16()
    moves = [1e-3 * start.float().abs() * (1 + 0.1 * torch.randn(1000)) for _ in range(8)]
    ends = [start.float() + move for move in moves]
    truth = torch.stack(moves).mean(0)
    of_weights = torch.stack(ends).mean(0).bfloat16().float() - start.float()
    of_ways = torch.stack(moves).mean(0).bfloat16().float()
    assert (of_ways - truth).norm() < 0.01 * truth.norm()
    assert (of_weights - truth).norm() > 0.5 * truth.norm()


def test_compression_pays_below_the_speed_of_the_formula() -> None:
    """On a link a little slower than `saved / seconds` the step is shorter with it, on a little faster one longer."""
    dense, wire, seconds = 4e8, Blocks(4).wire_bytes(10**8), 0.02
    limit = (dense - wire) / seconds
    for rate, pays in ((0.95 * limit, True), (1.05 * limit, False)):
        assert (seconds + wire / rate < dense / rate) is pays


def error_of(ranks: int, ring: bool) -> float:
    """Of the sum of gradients in int4, against its norm: a ring's partial sums, or originals in two hops of sqrt(N)."""
    torch.manual_seed(ranks)
    int4, grads = Blocks(4), [torch.randn(4096) for _ in range(ranks)]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return int4.decompress(int4.compress(x), len(x))

    exact = torch.stack(grads).sum(0)
    if ring:
        total = grads[0]
        for own in grads[1:]:
            total = rounded(total) + own
    else:
        node = math.isqrt(ranks)
        inside = [sum(map(rounded, grads[i : i + node]), torch.zeros(4096)) for i in range(0, ranks, node)]
        total = sum(map(rounded, inside), torch.zeros(4096))
    return float((total - exact).norm() / exact.norm())


def test_a_ring_of_rounded_sums_loses_more_with_every_rank_and_two_hops_do_not() -> None:
    assert error_of(64, ring=True) > 3 * error_of(4, ring=True)
    assert error_of(64, ring=False) < 1.2 * error_of(4, ring=False)


def one_bit(n: int) -> int:
    group = Group.world()
    Served(group, Sign(), n).mean(torch.randn(n), torch.empty(n)).wait()
    return sum(group.ledger.sent_bytes().values())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_bit_an_element_travels_twice(ranks: int) -> None:
    n = 8 * 12 * 100
    scales = 2 * 4 * (ranks - 1)
    assert run(one_bit, n, ranks=ranks) == [2 * (ranks - 1) * n // ranks // 8 + scales] * ranks
