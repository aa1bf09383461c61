"""Ring attention and Ulysses against plain attention: values, gradients, traffic, work, memory."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import run

from refimpl.comm.group import Group
from refimpl.measure.memory import MemoryMeter
from refimpl.parallel.context import blocks
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.loss import IGNORED, cross_entropy, token_mean
from refimpl.parallel.context.ring import ring_attention
from refimpl.parallel.context.ulysses import ulysses

B, D = 2, 8
SCALE = 0.3  # of scores; the default is 8 ** -0.5
# Both sum the same products in another order: some roundings of fp32 (1.2e-7) on values of about 1.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def given_tensors(heads: int, shared: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the output's gradient, of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, heads, length, D), (B, shared, length, D), (B, shared, length, D), (B, heads, length, D)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def plain(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    """Output and gradients of q, k, v, in one process."""
    q, k, v, out_grad = (x.clone() for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=SCALE)
    out.backward(out_grad)
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def attended(how: str, tensors: list[Tensor], causal: bool, zigzag: bool, tile: int) -> tuple[list[Tensor], int]:
    """Runs on every rank: (its part of output and gradients, bytes sent)."""
    group = Group.world()
    blocks.TILE = tile  # type: ignore[misc]
    layout = Layout(tensors[0].shape[2], group.size, zigzag)
    q, k, v, out_grad = (layout.cut(x, group.rank, dim=2) for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    if how != "ulysses":
        out = ring_attention(q, k, v, group, layout, causal, SCALE, {"ring": None, "tiles": False}[how])
    else:
        attention = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True, scale=SCALE)
        out = ulysses(q, k, v, group, attention)
    out.backward(out_grad)
    return [out.detach(), q.grad, k.grad, v.grad], sum(group.ledger.sent_bytes().values())  # type: ignore[list-item]


def joined(found: list[tuple[list[Tensor], int]], length: int, zigzag: bool) -> list[Tensor]:
    layout = Layout(length, len(found), zigzag)
    return [layout.join(list(parts), dim=2) for parts in zip(*(tensors for tensors, _ in found), strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("how", ["ring", "tiles"])
def test_the_ring_is_plain_attention(how: str, causal: bool, zigzag: bool, ranks: int) -> None:
    length, heads, shared = 24 * ranks, 6, 2
    tensors = given_tensors(heads, shared, length)
    found = run(attended, how, tensors, causal, zigzag, 5, ranks=ranks)  # tiles that divide nothing
    for ours, theirs in zip(joined(found, length, zigzag), plain(tensors, causal), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    part = 4 * B * shared * (length // ranks) * D
    assert {sent for _, sent in found} == {part * (2 * (ranks - 1) * 2 + 2 * ranks) if ranks > 1 else 0}


@pytest.mark.parametrize(
    ("ranks", "heads", "shared", "each"),
    [(2, 4, 4, 4), (3, 6, 2, 6), (4, 8, 2, 4), (4, 4, 1, 4), (2, 7, 7, 7), (4, 7, 7, 7), (2, 9, 3, 3), (3, 8, 2, 4)],
)
def test_ulysses_is_plain_attention(ranks: int, heads: int, shared: int, each: int) -> None:
    """`each`: heads of keys and values that are dealt out. The last four do not divide by the ranks."""
    length = 5 * ranks
    tensors = given_tensors(heads, shared, length)
    found = run(attended, "ulysses", tensors, True, False, 1024, ranks=ranks)
    for ours, theirs in zip(joined(found, length, False), plain(tensors, True), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    part = 4 * B * (length // ranks) * D  # bytes of one head's tokens
    for rank, (_, sent) in enumerate(found):
        units = each // ranks + (rank < each % ranks)  # of this rank, whatever it does for whom
        mine = 2 * units * heads // each + 2 * units  # heads of queries and outputs, of keys and values
        there, back = 2 * heads + 2 * each - mine, mine * (ranks - 1)
        assert sent == part * (there + back), "what goes to others' heads once, to others' tokens N - 1 times"


def test_in_bf16_the_ring_keeps_its_sums_in_fp32() -> None:
    tensors = given_tensors(4, 2, 48, torch.bfloat16)
    found = run(attended, "ring", tensors, True, True, 1024, ranks=3)
    exact = plain([x.float() for x in tensors], True)
    for ours, theirs in zip(joined(found, 48, True), exact, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0.03, atol=0.03)  # bf16 rounds by 0.004, several times
    part = B * 2 * 16 * D  # keys of a rank, or values
    assert {sent for _, sent in found} == {part * (2 * 2 * 2 * 2 + 4 * 2 * 3)}, "gradients of keys and values too"


@pytest.mark.parametrize(
    ("how", "length", "heads", "shared", "says"),
    [
        ("ulysses", 8, 1, 1, "1 heads of queries over 1 of keys and values cannot be dealt out to 2 ranks"),
        ("ulysses", 8, 6, 4, "6 heads of queries over 4 of keys and values cannot"),
        ("ring", 10, 4, 4, "a sequence of 10 tokens does not divide into 4 chunks for 2 ranks: pad it to 12"),
    ],
)
def test_what_does_not_divide_is_named(how: str, length: int, heads: int, shared: int, says: str) -> None:
    with pytest.raises(Exception, match=says):
        run(attended, how, given_tensors(heads, shared, length), True, how == "ring", 1024, ranks=2)


@given(st.integers(1, 6), st.integers(1, 5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_layout_cuts_and_joins_any_sequence(ranks: int, size: int, zigzag: bool) -> None:
    layout = Layout(2 * ranks * size, ranks, zigzag)
    x = torch.arange(layout.length).view(1, -1)
    parts = [layout.cut(x, rank) for rank in range(ranks)]
    assert torch.equal(layout.join(parts), x)
    assert all(torch.equal(part[0], layout.positions(rank)) for rank, part in enumerate(parts))
    work = [layout.work(rank) for rank in range(ranks)]
    assert sum(work) == layout.length * (layout.length + 1) // 2
    if zigzag:
        assert len(set(work)) == 1
    assert [layout.work(rank, causal=False) for rank in range(ranks)] == [layout.length * layout.here] * ranks


def test_contiguous_the_last_rank_has_almost_twice_the_work() -> None:
    layout = Layout(64 * 1024, 8)
    mean = sum(layout.work(rank) for rank in range(8)) / 8
    assert layout.work(7) / mean == pytest.approx((2 * 8 - 1) / 8, rel=1e-4)


def peak(length: int) -> int:
    """Runs on every rank: bytes at the peak of forward and backward, beyond its own q, k, v."""
    group = Group.world()
    blocks.TILE = 64  # type: ignore[misc]
    layout = Layout(length, group.size, zigzag=True)
    q, k, v = (torch.randn(1, 1, layout.here, D, requires_grad=True) for _ in range(3))
    with MemoryMeter(dict) as meter:
        ring_attention(q, k, v, group, layout, fused=False).sum().backward()
    return meter.peak["other"] + meter.peak["activations"]


def test_tile_by_tile_memory_grows_with_the_tokens_of_a_rank_and_not_with_their_square() -> None:
    short, long = run(peak, 512, ranks=2)[0], run(peak, 2048, ranks=2)[0]
    tokens, tile = (2048 - 512) // 2, 3 * 64 * 64 * 4
    assert long - short <= 20 * 4 * D * tokens, "less than 20 tensors of a rank's queries"
    assert short <= 20 * 4 * D * 256 + 3 * tile


def counted(length: int, width: int) -> tuple[float, float, float]:
    """Runs on every rank: bytes at the peak of forward, kept after it, at the peak of backward, a token of its own."""
    group = Group.world(transport="gloo")  # which holds no copy of a message
    layout = Layout(length, group.size, zigzag=True)
    q, k, v = (torch.randn(1, 1, layout.here, width, requires_grad=True) for _ in range(3))
    with MemoryMeter(dict) as meter:
        out = ring_attention(q, k, v, group, layout)
        forward, kept = dict(meter.peak), meter.now()
        meter.reset_peak()
        out.backward(torch.ones_like(out))
    found = [sizes["activations"] + sizes["other"] for sizes in (forward, kept, meter.peak)]
    return found[0] / layout.here, found[1] / layout.here, found[2] / layout.here


@pytest.mark.parametrize(("ranks", "length", "width"), [(4, 64 * 1024, 1), (3, 6 * 1024, 8)])
def test_memory_of_a_sequence_of_64k_tokens_is_the_formula(ranks: int, length: int, width: int) -> None:
    """By torch's kernel: nowhere a matrix of scores, of which a rank's would be 65,536 numbers a token."""
    found = run(counted, length, width, ranks=ranks)
    tensor, number = 4 * width, 4  # bytes a token; the meter sees q too, and not k and v, and in backward out_grad
    assert {forward for forward, _, _ in found} == {7 * tensor + 4 * number}
    assert {kept for _, kept, _ in found} == {2 * tensor + number}
    assert max(backward for _, _, backward in found) == 17.5 * tensor + number


def order() -> list[tuple[str, str]]:
    """Runs on every rank: what happened in forward and backward, in order; each message's begin and end."""
    group = Group.world()
    q, k, v, out_grad = (Layout(12, group.size).cut(x, group.rank, dim=2) for x in given_tensors(2, 2, 12))
    for x in (q, k, v):
        x.requires_grad_()
    ring_attention(q, k, v, group, Layout(12, group.size), causal=False).backward(out_grad)
    return [(e.phase, e.tag or e.op) for e in group.ledger.events if e.op != "recv"]


def test_the_next_keys_are_on_their_way_while_a_block_is_computed() -> None:
    begins, ends = ("start", "keys and values"), ("end", "keys and values")
    back_begins, back_ends = ("start", "gradients of keys and values"), ("end", "gradients of keys and values")
    forward, backward = ("mark", "attention"), ("mark", "attention, backward")
    expected = [begins, forward, ends] * 2 + [forward]
    expected += [begins, backward, back_begins, ends]
    expected += [begins, backward, back_ends, back_begins, ends]  # the gradients of the block before come meanwhile
    expected += [backward, back_ends, back_begins, back_ends]
    assert run(order, ranks=3) == [expected] * 3


@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_runs_of_two_ranks_that_meet_are_one_block(ranks: int, size: int, zigzag: bool, causal: bool) -> None:
    layout = Layout(2 * ranks * size, ranks, zigzag)
    for queries in range(ranks):
        for keys in range(ranks):
            seen = torch.zeros(layout.here, layout.here, dtype=torch.bool)
            if block := layout.block(queries, keys, causal):
                mine, theirs, diagonal = block
                ones = torch.ones_like(seen[mine, theirs])
                seen[mine, theirs] = ones.tril() if diagonal else ones
            later = layout.positions(queries)[:, None] >= layout.positions(keys)
            assert torch.equal(seen, later if causal else torch.ones_like(seen))


def weighted(targets: Tensor, weight: Tensor, x: Tensor) -> tuple[float, Tensor]:
    """Runs on every rank: the mean over ranks of the loss, and of the weight's gradient."""
    group = Group.world()
    layout = Layout(x.shape[1], group.size)
    weight = weight.clone().requires_grad_()
    logits, its = layout.cut(x, group.rank) @ weight, layout.cut(targets, group.rank)
    loss = cross_entropy(logits, its, group)
    loss.backward()
    half = logits.detach().bfloat16()
    assert torch.equal(cross_entropy(half, its, group), cross_entropy(half.float(), its, group)), "in fp32"
    assert cross_entropy(logits.detach(), torch.full_like(its, IGNORED), group) == 0, "no token anywhere"
    tokens = torch.tensor(3.0 + group.rank, dtype=torch.float64)
    token_mean(loss.detach(), tokens, group)
    assert tokens == 3 + group.rank, "the caller's own"
    value, grad = loss.detach().reshape(1).clone(), weight.grad
    assert grad is not None
    group.all_reduce(value, "mean")
    group.all_reduce(grad, "mean")
    return value.item(), grad


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_token_counts_alike_where_ranks_have_unequally_many(ranks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 12, 5, generator=generator), torch.randn(5, 7, generator=generator)
    targets = torch.randint(7, (2, 12), generator=generator)
    targets[:, : 12 // ranks] = IGNORED  # rank 0 has a masked prompt and nothing else
    targets[0, -3:] = IGNORED
    value, grad = run(weighted, targets, weight, x, ranks=ranks)[0]
    one = weight.clone().requires_grad_()
    loss = F.cross_entropy((x @ one).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    assert one.grad is not None
    assert value == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(grad, one.grad, **CLOSE)
