"""What cards claim of compressed gradients: codes, scales, squares, 16 bits, and when it pays."""

import math

import pytest
import torch
from worlds import run

from refimpl.comm.group import Group
from refimpl.compress.blocks import Blocks
from refimpl.compress.compressor import Compressor
from refimpl.compress.exchange import Gathered, Served
from refimpl.compress.feedback import ErrorFeedback
from refimpl.compress.powersgd import LowRank, PowerSGD
from refimpl.compress.sign import Sign
from refimpl.compress.topk import TopK


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


def sent_by(n: int) -> tuple[int, int, int, int]:
    """Bytes of a ring's all-reduce, of 1% gathered, of int8 codes gathered, and of int8 codes served."""
    group, blocks = Group.world(), Blocks(8, block=40)
    ways = [Gathered(group, TopK(0.01), n), Gathered(group, blocks, n), Served(group, blocks, n)]
    group.all_reduce(torch.randn(n))
    sent = [sum(group.ledger.sent_bytes().values())]
    for way in ways:
        group.ledger.reset()
        way.mean(torch.randn(n), torch.empty(n)).wait()
        sent.append(sum(group.ledger.sent_bytes().values()))
    return sent[0], sent[1], sent[2], sent[3]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathered_each_wire_goes_to_all_and_served_there_and_back(ranks: int) -> None:
    n, wire = 4800, 4800 + 4 * 4800 // 40
    for dense, largest, gathered, served in run(sent_by, n, ranks=ranks):
        assert dense / largest == pytest.approx(1 / (0.01 * ranks))
        assert gathered == (ranks - 1) * wire
        assert served == 2 * (ranks - 1) * wire // ranks


def mean_of_compressed(of_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By PowerSGD and by top-k: this rank's share of `of_ranks` matrices is its mean of them."""
    group = Group.world()
    ms = torch.randn(of_ranks, 24 * 20, generator=torch.Generator().manual_seed(0))
    x = ms.chunk(group.size)[group.rank].mean(0)
    out = [torch.empty(480), torch.empty(480)]
    LowRank(group, PowerSGD(2), 480, [torch.Size((24, 20))]).mean(x, out[0]).wait()
    Gathered(group, TopK(0.1), 480).mean(x, out[1]).wait()
    return out[0], out[1]


def test_the_mean_of_powersgds_messages_is_the_means_message_and_that_of_top_k_is_not() -> None:
    (low_rank, largest), *_ = run(mean_of_compressed, 3, ranks=3)
    [(low_rank_of_mean, largest_of_mean)] = run(mean_of_compressed, 3, ranks=1)
    assert torch.allclose(low_rank, low_rank_of_mean, atol=1e-5)
    assert largest.count_nonzero() > 2 * largest_of_mean.count_nonzero()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_number_of_a_block_is_wrong_by_half_a_scale_at_most(bits: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(100_000)
    x[0] = most = 5.0
    wrong = (Blocks(bits, block=len(x)).decompress(Blocks(bits, block=len(x)).compress(x), len(x)) - x).abs().max()
    assert wrong == pytest.approx(most / (2 ** (bits - 1) - 1) / 2, rel=0.01)
