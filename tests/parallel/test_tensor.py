"""Split layers against the plain ones: bits where arithmetic allows it, else the bound that rounding obeys."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import run

from refimpl.comm.group import Group
from refimpl.grading.memory import Largest
from refimpl.parallel.draws import Draws
from refimpl.parallel.tensor import ColumnParallelEmbedding, ColumnParallelLinear, RowParallelLinear
from refimpl.parallel.vocabulary import VocabParallelEmbedding, VocabParallelLoss

every_world = pytest.mark.parametrize("ranks", [2, 3, 4])
EPS = torch.finfo(torch.float32).eps


def pair() -> None:
    """A column and a row layer around a GELU: Megatron's MLP."""
    group = Group.world()
    torch.manual_seed(0)
    K, H = 48, 64 * group.size  # each rank's part is a multiple of 16: the kernel adds in the same order
    up, down = nn.Linear(K, H), nn.Linear(H, K)
    column, row = ColumnParallelLinear(up, group), RowParallelLinear(down, group)
    mine = slice(64 * group.rank, 64 * (group.rank + 1))
    x, g = torch.randn(2, 5, K), torch.randn(2, 5, K)
    whole_x, split_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    hidden = F.gelu(up(whole_x))
    whole = down(hidden)
    whole.backward(g)
    group.ledger.reset()
    part = F.gelu(column(split_x))
    y = row(part)
    n = 4 * x.numel()
    assert group.ledger.sent_bytes() == {"all_reduce": 2 * n * (group.size - 1) // group.size}  # g
    y.backward(g)
    assert group.ledger.calls() == {"all_reduce": 2}  # and f
    # Columns: the same dot products. Rows: the sum of the parts in rank order, bit for bit.
    assert torch.equal(part, hidden[..., mine])
    total = sum(
        F.linear(hidden[..., 64 * r : 64 * (r + 1)], down.weight[:, 64 * r : 64 * (r + 1)]) for r in range(group.size)
    )
    assert torch.equal(y, total + down.bias)
    bound = 2 * H * EPS * F.linear(hidden.abs(), down.weight.abs(), down.bias.abs())
    assert ((y - whole).abs() <= bound).all()
    # Gradients: a part's is that part of the whole's; the bias of rows is whole.
    assert torch.equal(row.weight.grad, down.weight.grad[:, mine])
    assert torch.equal(row.bias.grad, down.bias.grad)
    torch.testing.assert_close(column.weight.grad, up.weight.grad[mine], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(column.bias.grad, up.bias.grad[mine], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(split_x.grad, whole_x.grad, rtol=1e-5, atol=1e-5)
    # A part's memory is its own: nothing of the whole is alive behind it.
    assert column.weight.untyped_storage().nbytes() == 4 * 64 * K
    assert row.weight.untyped_storage().nbytes() == 4 * 64 * K


@every_world
def test_columns_are_bit_equal_and_rows_are_within_the_bound(ranks: int) -> None:
    run(pair, ranks=ranks)


def kinds() -> None:
    """Units that do not divide, fused blocks, gathered outputs, whole inputs, no bias, frozen weights."""
    group = Group.world()
    torch.manual_seed(1)
    qkv = nn.Linear(16, 3 * 5 * 4, bias=False)  # five heads of 4
    column = ColumnParallelLinear(qkv, group, units=5, blocks=3, gathered=True)
    assert column.bias is None
    assert column.weight.shape[0] == 3 * 4 * (5 // group.size + (group.rank < 5 % group.size))
    x = torch.randn(3, 16)
    y = column(x)
    torch.testing.assert_close(y, qkv(x), rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    qkv(x).square().sum().backward()
    torch.testing.assert_close(
        column.split.gather(column.weight.grad, group, 0, "test"), qkv.weight.grad, rtol=1e-4, atol=1e-4
    )
    uneven = nn.Linear(16, 8 + 5 + 5)  # queries, keys and values: of each block every rank has some outputs
    part_of_each = ColumnParallelLinear(uneven, group, blocks=(8, 5, 5), gathered=True)
    torch.testing.assert_close(part_of_each(x), uneven(x), rtol=1e-5, atol=1e-6)
    down = nn.Linear(7, 3)
    down.weight.requires_grad_(False)
    row = RowParallelLinear(down, group, scattered=False)
    x = torch.randn(2, 7, requires_grad=True)
    torch.testing.assert_close(row(x), down(x), rtol=1e-5, atol=1e-6)
    row(x).sum().backward()
    assert row.weight.grad is None
    torch.testing.assert_close(x.grad, down.weight.sum(0).expand(2, 7), rtol=1e-5, atol=1e-6)
    table = nn.Embedding(9, 5)
    part = ColumnParallelEmbedding(table, group)
    assert torch.equal(part(torch.arange(9)), part.split.part(table.weight, group.rank, 1))
    two_a_head = ColumnParallelEmbedding(nn.Embedding(9, 2 * 5), group, units=5)
    assert two_a_head.weight.shape[1] == 2 * (5 // group.size + (group.rank < 5 % group.size))
    with pytest.raises(TypeError, match="LayerNorm is no linear layer"):
        ColumnParallelLinear(nn.LayerNorm(4), group)
    with pytest.raises(ValueError, match="up: 10 outputs are not blocks of 3"):
        ColumnParallelLinear(nn.Linear(2, 10), group, blocks=3, name="up")
    with pytest.raises(ValueError, match="out: 1 units of 8 cannot be dealt"):
        RowParallelLinear(nn.Linear(8, 4), group, units=1, name="out")
    with pytest.raises(ValueError, match=r"up: .* one of a kind: copies must be 1, not 2"):
        ColumnParallelLinear(nn.Linear(2, 10), group, copies=2, gathered=True, name="up")
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(ValueError, match=r"words: an embedding with .* cannot be split"):
            VocabParallelEmbedding(nn.Embedding(8, 2, **option), group, name="words")  # type: ignore[arg-type]


@every_world
def test_odd_sizes_fused_blocks_and_gathered_outputs(ranks: int) -> None:
    run(kinds, ranks=ranks)


def kept() -> None:
    group = Group.world()
    torch.manual_seed(3)
    linear, back, table = nn.Linear(8, 12), nn.Linear(12, 8), nn.Embedding(11, 8)
    row = RowParallelLinear(back, group)
    layers = [(ColumnParallelLinear(linear, group), linear), (row, back), (VocabParallelEmbedding(table, group), table)]
    for layer, whole in layers:
        for name, (split, dim) in layer.splits.items():
            assert torch.equal(split.gather(getattr(layer, name).detach(), group, dim, "test"), getattr(whole, name))
        twin = copy.deepcopy(layer)
        assert twin.group is group
        assert twin.weight is not layer.weight
    assert torch.equal(row.bias, back.bias)


@every_world
def test_parts_are_the_plain_layers_and_a_copy_talks_to_the_same_ranks(ranks: int) -> None:
    run(kept, ranks=ranks)


def tied(ignored: bool) -> None:
    """Embedding, head and loss over one table of 37 rows."""
    group = Group.world()
    torch.manual_seed(5)
    V, C, n = 37, 16, 48
    plain = nn.Embedding(V, C)
    table = VocabParallelEmbedding(plain, group)
    loss = VocabParallelLoss(V, group)
    ids, targets = torch.randint(V, (2, n // 2)), torch.randint(V, (2, n // 2))
    if ignored:
        targets[0, ::3] = -100
    x = plain(ids)
    expected = F.cross_entropy((3 * x.tanh() @ plain.weight.T).flatten(0, 1), targets.flatten())
    expected.backward()
    group.ledger.reset()
    head = ColumnParallelLinear(nn.Linear(C, V, bias=False), group)
    head.weight = table.weight
    with Largest(floating=True) as largest:
        y = head(3 * table(ids).tanh())
        found = loss(y, targets)
        assert group.ledger.sent_bytes()["all_reduce"] == sum(
            2 * 4 * numel * (group.size - 1) // group.size for numel in (n * C, n, 2 * n)
        )
        found.backward()
    assert largest.numel <= n * max(max(table.split.sizes), C) < n * V  # no row of logits is ever whole
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    whole = table.split.gather(table.weight.grad, group, 0, "test")
    torch.testing.assert_close(whole, plain.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ignored", [False, True])
@every_world
def test_tied_embedding_and_loss_without_a_row_of_logits(ranks: int, ignored: bool) -> None:
    run(tied, ignored, ranks=ranks)


def losses() -> None:
    group = Group.world()
    torch.manual_seed(6)
    V, logits, targets = 10, 5 * torch.randn(7, 10), torch.randint(10, (7,))
    targets[3] = 2
    logits[3] += 1e4  # overflows without the maximum
    for reduction in ("mean", "sum", "none"):
        loss = VocabParallelLoss(V, group, ignore_index=2, reduction=reduction)
        whole, part = logits.clone().requires_grad_(), loss.split.part(logits, group.rank, 1).requires_grad_()
        expected = F.cross_entropy(whole, targets, ignore_index=2, reduction=reduction)
        found = loss(part, targets)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()
        (found * weight).sum().backward()
        torch.testing.assert_close(part.grad, loss.split.part(whole.grad, group.rank, 1), rtol=1e-5, atol=1e-6)
    half = loss.split.part(logits, group.rank, 1).bfloat16().requires_grad_()
    loss(half, targets).sum().backward()
    assert half.grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"rank \d has \d of 10 tokens"):
        loss(logits, targets)
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match=r"targets -?\d+ to \d+: the vocabulary is 0 to 9"):
            loss(half, targets.index_fill(0, torch.tensor([5]), wrong))
    padded = nn.Embedding(10, 4, padding_idx=7)
    table = VocabParallelEmbedding(padded, group)
    ids = torch.tensor([1, 7, 7, 9])
    padded(ids).sum().backward()
    table(ids).sum().backward()
    assert torch.equal(table.split.gather(table.weight.grad, group, 0, "test"), padded.weight.grad)
    with pytest.raises(IndexError, match="tokens 1 to 10: the vocabulary is 0 to 9"):
        table(torch.tensor([1, 10]))


@every_world
def test_losses_are_those_of_torch(ranks: int) -> None:
    run(losses, ranks=ranks)


def dropped() -> tuple[Tensor, Tensor]:
    """A mask where tensors are whole, and one where they are split, interleaved as a model does."""
    group = Group.world()
    torch.manual_seed(11)
    draws = Draws(11, group.rank)
    up, down = nn.Linear(8, 16 * group.size), nn.Linear(16 * group.size, 8)
    column = ColumnParallelLinear(up, group, draws=draws)
    row = RowParallelLinear(down, group, draws=draws)
    common, own = [], []
    for _ in range(2):
        common.append(torch.rand(4))
        hidden = column(torch.ones(1, 8))
        own.append(torch.rand(4))
        row(hidden)
    assert not draws.inside
    ColumnParallelLinear(up, group, gathered=True, draws=draws)(torch.ones(1, 8))
    assert not draws.inside, "all outputs are here: whoever drops of them drops the same on every rank"
    states = draws.get_states()
    with draws.apart():
        a = torch.rand(3)
    draws.set_states(states)
    with draws.apart():
        assert torch.equal(torch.rand(3), a)
    return torch.cat(common), torch.cat(own)


def test_dropout_draws_alike_where_tensors_are_whole_and_apart_where_they_are_split() -> None:
    results = run(dropped, ranks=3)
    torch.manual_seed(11)
    nn.Linear(8, 48), nn.Linear(48, 8)
    plain = torch.rand(8)  # the common stream is the plain model's: what ranks draw apart takes nothing out of it
    assert all(torch.equal(common, plain) for common, _ in results)
    assert len({tuple(own.tolist()) for _, own in results}) == 3
