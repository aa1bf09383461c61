"""Who sends what: the mean that every rank gets, the bytes that it sends for it, and the errors that it keeps."""

import pytest
import torch
import worlds
from operators import OPERATORS
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.compress.blocks import Blocks
from refimpl.compress.compressor import Compressor
from refimpl.compress.exchange import Exchange, Gathered, Scattered, Served, Summed, equal_chunks
from refimpl.compress.feedback import ErrorFeedback
from refimpl.compress.sign import Sign

WAYS: dict[str, type[Exchange]] = {"gathered": Gathered, "scattered": Scattered, "served": Served}
CALLS = 3


def numbers(rank: int, call: int, n: int) -> Tensor:
    """Of very different scales: codes of different ranks have nothing in common."""
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * call + rank)) * 10.0**rank


def run(way: str, name: str, n: int, chunks: list[int] | None, op: str) -> tuple[list[Tensor], int, int, list[Tensor]]:
    group = Group.world()
    exchange = WAYS[way](group, OPERATORS[name], n, chunks=chunks)
    outs = []
    group.ledger.reset()
    for call in range(CALLS):
        out = torch.empty(exchange.out_numel())
        exchange.mean(numbers(group.rank, call, n), out, op).wait()  # type: ignore[arg-type]
        exchange.accept()
        outs.append(out)
    sent = sum(group.ledger.sent_bytes().values())
    return outs, sent, exchange.sent_bytes() * CALLS, [state.error for state in exchange.states()]


def oracle(way: str, name: str, n: int, chunks: list[int], ranks: int, op: str) -> list[Tensor]:
    """One process that plays all ranks."""
    operator: Compressor = OPERATORS[name]
    pieces = [n] if way == "gathered" else chunks
    workers = [[ErrorFeedback(operator, length) for length in pieces] for _ in range(ranks)]
    servers = [ErrorFeedback(operator, length) for length in chunks]
    means = []
    for call in range(CALLS):
        parts = []
        for i, length in enumerate(pieces):
            total = torch.zeros(length)
            for rank in range(ranks):
                draw = 2 * call * ranks + rank
                wire = workers[rank][i].compress(numbers(rank, call, n).split(pieces)[i], draw)
                total += operator.decompress(wire, length, turn=draw)
            total = total / ranks if op == "mean" else total
            if way == "served":
                draw = (2 * call + 1) * ranks + i
                total = operator.decompress(servers[i].compress(total, draw), length, turn=draw)
            parts.append(total)
        means.append(torch.cat(parts))
    return means


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("ranks", "n", "uneven", "op"), [(2, 301, False, "mean"), (3, 77, True, "sum"), (4, 5, False, "mean")]
)
def test_the_mean_is_of_what_was_decompressed(way: str, ranks: int, n: int, uneven: bool, op: str) -> None:
    chunks = [0, 13, 64][:ranks] if uneven else None
    for name in ("int8 in blocks of 16", "int4 stochastic", "sign"):
        results = worlds.run(run, way, name, n, chunks, op, ranks=ranks)
        parts = chunks or equal_chunks(n, ranks)
        expected = oracle(way, name, n, parts, ranks, op)
        for rank, (outs, sent, formula, _) in enumerate(results):
            assert sent == formula
            for out, mean in zip(outs, expected, strict=True):
                assert torch.equal(out, mean.split(parts)[rank] if way == "scattered" else mean)


def served_on_average(draws: int) -> float:
    """How far the mean of many calls without feedback is from the ranks' mean, in its standard deviations."""
    group, n = Group.world(), 48
    exchange, out = Served(group, OPERATORS["int4 stochastic"], n, feedback=False), torch.empty(n)
    x, total, squares = numbers(group.rank, 0, n), torch.zeros(n).double(), torch.zeros(n).double()
    for _ in range(draws):
        exchange.mean(x, out).wait()
        total += out
        squares += out.double().square()
    mean = total / draws
    spread = ((squares / draws - mean.square()).clamp(min=0) / draws).sqrt()
    exact = sum(numbers(rank, 0, n).double() for rank in range(group.size)) / group.size
    return float(((mean - exact).abs() / (spread + 1e-4)).max())


def test_rounded_twice_at_random_is_right_on_average() -> None:
    assert max(worlds.run(served_on_average, 1500)) < 5


def test_bytes_are_those_of_the_formulas() -> None:
    group = Group(None)
    n, block = 1000, Blocks(4, block=50)
    assert Gathered(group, block, n).sent_bytes() == 0
    assert block.wire_bytes(n) == n // 2 + 4 * n // 50
    assert Sign().wire_bytes(n) == n // 8 + 4


def test_one_rank_compresses_all_the_same() -> None:
    x, out = torch.randn(40), torch.empty(40)
    for way in WAYS.values():
        exchange = way(Group(None), Sign(), 40)
        exchange.mean(x, out).wait()
        assert torch.equal(out.abs(), x.abs().mean().expand(40)) or way is Served
        assert torch.equal(exchange.worker[0].error, x - Sign().decompress(Sign().compress(x), 40))


def test_what_is_refused() -> None:
    group = Group(None)
    with pytest.raises(ValueError, match="Sign: the sum of its wires"):
        Summed(group, Sign(), 3)
    with pytest.raises(ValueError, match="chunks"):
        Served(group, Sign(), 3, chunks=[1, 2])
    with pytest.raises(ValueError, match=r"must have \[3\] fp32"):
        Served(group, Sign(), 3).mean(torch.ones(3), torch.ones(3).double())
