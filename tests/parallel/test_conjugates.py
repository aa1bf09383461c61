"""The conjugate pairs: each backward is the transpose of its forward, and each sends what its row of the table says."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from worlds import run

from refimpl.comm.group import Group
from refimpl.parallel import conjugates
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.ring import ring_attention
from refimpl.parallel.overlap import coming
from refimpl.parallel.split import Split
from refimpl.parallel.vocabulary import parted_cross_entropy

FUNCTIONS = ["copy", "reduce", "scatter", "gather", "gather_sum", "sum_scatter"]
WHOLE = (2, 12, 24)  # B, T, C: 12 tokens, 24 features go into 2, 3 and 4 ranks


def shape(name: str, ranks: int) -> tuple[int, ...]:
    """What a function takes: the whole, or a part of the features or of the tokens."""
    b, t, c = WHOLE
    return {"gather": (b, t, c // ranks), "gather_sum": (b, t // ranks, c)}.get(name, WHOLE)


def sent(name: str, ranks: int) -> tuple[dict[str, int], dict[str, int]]:
    """The table: bytes in forward and in backward, by collective."""
    n = 4 * torch.Size(WHOLE).numel()
    half, none = n * (ranks - 1) // ranks, dict[str, int]()
    reduced, gathered, scattered = {"all_reduce": 2 * half}, {"all_gather": half}, {"reduce_scatter": half}
    return {
        "copy": (none, reduced),
        "reduce": (reduced, none),
        "scatter": (none, gathered),
        "gather": (gathered, none),
        "gather_sum": (gathered, scattered),
        "sum_scatter": (scattered, gathered),
    }[name]


def one(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[dict[str, int], dict[str, int]]]:
    """This rank's x, f(x), y, its pull-back f*(y), and what both sent."""
    group = Group.world()
    function: Callable[[Tensor, Group], Tensor] = getattr(conjugates, name)
    torch.manual_seed(group.rank)
    x = torch.randn(shape(name, group.size), dtype=torch.float32)
    if name == "scatter":
        torch.manual_seed(7)
        x = torch.randn(WHOLE)  # equal on all ranks, as it asks
    x.requires_grad_()
    before = x.detach().clone()
    group.ledger.reset()
    out = function(x, group)
    forward = group.ledger.sent_bytes()
    group.ledger.reset()
    y = torch.randn_like(out)
    kept = y.clone()
    (back,) = torch.autograd.grad(out, x, y)
    assert torch.equal(x, before)
    assert torch.equal(y, kept)  # somebody else may use both
    return x.detach(), out.detach(), y, back, (forward, group.ledger.sent_bytes())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_backward_is_the_transpose_and_bytes_are_the_tables(ranks: int) -> None:
    """<f x, y> = <x, f* y>, summed over the ranks.

    Where the contract says that what a rank is given, x or y, is equal on all ranks, one of them counts for all.
    """
    for name in ["copy", "reduce", "gather_sum", "sum_scatter"]:
        results = run(one, name, ranks=ranks)
        left = sum((fx.double() * y.double()).sum() for _, fx, y, _, _ in results)
        right = sum((x.double() * back.double()).sum() for x, _, _, back, _ in results)
        if name == "copy":  # as a map of one vector to N equal ones: of x and its gradient rank 0's is the whole
            left = sum((results[0][0].double() * y.double()).sum() for _, _, y, _, _ in results)
            right = (results[0][0].double() * results[0][3].double()).sum()
        if name == "reduce":  # of N vectors to their sum: all ranks hold the same sum and the same gradient
            left = (results[0][1].double() * results[0][2].double()).sum()
            right = sum((x.double() * results[0][3].double()).sum() for x, _, _, _, _ in results)
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-3)
        assert [counted for *_, counted in results] == [sent(name, ranks)] * ranks
    for name in ["scatter", "gather"]:
        assert [counted for *_, counted in run(one, name, ranks=ranks)] == [sent(name, ranks)] * ranks


def rounds() -> None:
    """Each function after its conjugate, or before it, is the identity or a sum that one process can make."""
    group = Group.world()
    torch.manual_seed(0)
    xs = [torch.randn(WHOLE) for _ in range(group.size)]
    x, total = xs[group.rank], xs[0]
    for other in xs[1:]:
        total = total + other
    assert torch.equal(conjugates.reduce(x, group), total)  # the order of the ranks: the same bits
    assert torch.equal(conjugates.sum_scatter(x, group), total.chunk(group.size, 1)[group.rank])
    assert torch.equal(conjugates.gather_sum(conjugates.sum_scatter(x, group), group), total)
    assert torch.equal(conjugates.sum_scatter(x, group, dim=-1), total.chunk(group.size, -1)[group.rank])
    for dim in (0, 1, 2, -1):
        if WHOLE[dim] % group.size == 0:
            part = conjugates.scatter(total, group, dim)
            assert torch.equal(part, total.chunk(group.size, dim)[group.rank])
            assert torch.equal(conjugates.gather(part, group, dim), total)
    split = Split((9, 15), 3, group.size) if group.size < 4 else Split((8, 16), 4, group.size)
    whole = total.clone().requires_grad_()
    part = conjugates.scatter(whole, group, split=split)
    assert part.shape[-1] == split.sizes[group.rank]
    back = conjugates.gather(part, group, split=split)
    assert torch.equal(back, total)
    back.backward(xs[0])
    assert torch.equal(whole.grad, xs[0])
    # Twice: the backward of a backward is the forward again.
    y = x.clone().requires_grad_()
    weight = torch.ones(WHOLE, requires_grad=True)
    (first,) = torch.autograd.grad((conjugates.copy(y, group) * weight).sum(), y, create_graph=True)
    assert torch.equal(first, torch.full(WHOLE, float(group.size)))
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert torch.equal(second, torch.ones(WHOLE))
    with pytest.raises(ValueError, match=rf"dimension 1 has 13, which {group.size} ranks cannot share equally: pad it"):
        conjugates.sum_scatter(torch.zeros(1, 13, 2), group)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_there_and_back_again(ranks: int) -> None:
    run(rounds, ranks=ranks)


def twice() -> None:
    group = Group.world()
    x, weight = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((1, 3, 4), (4, 4)))
    curved = []
    for gathered in (coming(x, group).through(lambda part: part @ weight), conjugates.gather_sum(x, group) @ weight):
        (slope,) = torch.autograd.grad(gathered.square().sum(), x, create_graph=True)
        curved.append(torch.autograd.grad(slope.square().sum(), [x, weight]))
    torch.testing.assert_close(curved[0], curved[1])
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    attended = ring_attention(q, q, q, group, Layout(3 * group.size, group.size), fused=False)
    counts, targets = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
    span = slice(4 * group.rank, 4 * (group.rank + 1))
    for one in (attended, parted_cross_entropy(q.view(3, 4), targets, counts, span, group)):
        (slope,) = torch.autograd.grad(one.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()


def test_a_second_derivative_is_right_or_an_error() -> None:
    run(twice, ranks=3)


def test_a_group_of_one_exchanges_nothing() -> None:
    group = Group(None)
    x = torch.randn(WHOLE, requires_grad=True)
    for name in FUNCTIONS:
        assert getattr(conjugates, name)(x, group) is x
    assert group.ledger.calls() == {}


@pytest.mark.parametrize(("blocks", "units"), [((12,), 12), ((12,), 4), ((8, 4, 4), 4), ((257,), 257), ((6, 6), 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_join_to_the_whole_and_cut_no_unit(blocks: tuple[int, ...], units: int, ranks: int) -> None:
    split = Split(blocks, units, ranks)
    x = torch.arange(2 * sum(blocks)).view(2, -1)
    parts = [split.part(x, rank, 1) for rank in range(ranks)]
    assert [part.shape[1] for part in parts] == split.sizes
    assert torch.equal(split.join(parts, 1), x)
    assert max(map(len, map(split.units_of, range(ranks)))) - min(map(len, map(split.units_of, range(ranks)))) <= 1
    assert [unit for rank in range(ranks) for unit in split.units_of(rank)] == list(range(units))


@pytest.mark.parametrize(
    ("blocks", "units", "ranks", "copies"),
    [((48, 4, 4), (12, 1, 1), 4, 4), ((48, 8, 8), (12, 2, 2), 4, 2), ((28, 8), (7, 1), 3, 3), ((4,), 2, 4, 2)],
)
def test_blocks_of_few_units_are_on_several_ranks(
    blocks: tuple[int, ...], units: int | tuple[int, ...], ranks: int, copies: int
) -> None:
    split = Split(blocks, units, ranks, copies=copies)
    x = torch.arange(2 * sum(blocks)).view(2, -1)
    parts = [split.part(x, rank, 1) for rank in range(ranks)]
    assert [part.shape[1] for part in parts] == split.sizes
    assert torch.equal(split.join(parts, 1), x)
    for rank, part in enumerate(parts):
        first = rank - rank % copies
        (mine,), (theirs,) = split.copied(rank), split.copied(first)
        assert torch.equal(part[:, mine], parts[first][:, theirs]), "ranks with the same heads of keys"
    counted = sum(split.sizes) - sum(s.stop - s.start for r in range(ranks) if r % copies for s in split.copied(r))
    assert counted == sum(blocks), "each once"


def test_what_cannot_be_dealt_out_is_refused_with_its_sizes() -> None:
    with pytest.raises(ValueError, match=r"k_proj: 2 units of 8 cannot be dealt to 4 ranks, .* use at most 2 ranks"):
        Split((16,), 2, 4, "k_proj")
    with pytest.raises(ValueError, match="q_proj: 15 features are not 2 equal units"):
        Split((15,), 2, 2, "q_proj")
    assert [Split((64,), 8, 8).spans(rank) for rank in (0, 7)] == [[slice(0, 8)], [slice(56, 64)]]
    with pytest.raises(ValueError, match="8 units of 8 cannot be dealt to 16 ranks"):
        Split((64,), 8, 16)
    assert [Split((64,), 8, 16, copies=2).spans(rank) for rank in (0, 1, 2)] == [[slice(0, 8)]] * 2 + [[slice(8, 16)]]
