"""Flash attention beside torch's attention in float64: masks, lengths, widths, layouts, and what it reads."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from agreement import BOUND, assert_agrees
from torch import Tensor

from refimpl.kernels import flash_shapes
from refimpl.kernels.block_sparse_kernels import tile as sparse_tile
from refimpl.kernels.count import counted
from refimpl.kernels.flash_attention import flash_attention, flash_attention_varlen, reference, reference_varlen
from refimpl.kernels.flash_backward import backward_tiles
from refimpl.kernels.flash_forward import forward_tiles
from refimpl.kernels.flash_shapes import reach
from refimpl.kernels.language import INTERPRETED, REHEARSING, shared_memory


def bound(dtype: torch.dtype) -> float:
    """Twice the usual in bf16: the interpreter cuts results off where a GPU rounds, and dq is made of out."""
    return BOUND[dtype] * (2 if dtype == torch.bfloat16 else 1)


def heads(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


def assert_equals_torch(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: tuple[int, int] | None = None
) -> None:
    scale = min(0.3, 2.4 * q.shape[-1] ** -0.5)  # wider scores lose more digits, in torch's fp32 too

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=causal, window=window, scale=scale)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference(q, k, v, *reach(causal, window), scale)

    assert_agrees(ours, theirs, (q, k, v), bound(q.dtype))


@pytest.mark.parametrize(
    ("dtype", "queries", "keys", "width", "causal", "window"),
    [
        (torch.float32, 70, 70, 64, True, None),
        (torch.bfloat16, 150, 150, 64, True, None),
        (torch.float16, 150, 70, 17, True, None),  # the first 80 queries see nothing
        (torch.float32, 1, 130, 40, True, None),  # a step of decoding
        (torch.bfloat16, 140, 200, 33, False, (40, 9)),
        (torch.float32, 40, 70, 256, False, None),
        (torch.float16, 70, 70, 256, True, (20, 0)),
    ],
    ids=str,
)
def test_equals_float64(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, width: int, causal: bool,
    window: tuple[int, int] | None,
) -> None:  # fmt: skip
    q = heads(device, dtype, 1, 2, queries, width)
    assert_equals_torch(
        q, heads(device, dtype, 1, 1, keys, width), heads(device, dtype, 1, 1, keys, width), causal, window
    )


def test_more_blocks_than_one_in_every_loop(device: torch.device) -> None:
    q, k, v = (heads(device, torch.float16, 1, 1, 300, 16) for _ in "qkv")
    assert_equals_torch(q, k, v, causal=True, window=(100, 0))


def test_any_strides(device: torch.device) -> None:
    """As a model cuts them: heads behind tokens, one tensor for q, k and v; a reversed order; every second element."""
    together = torch.randn(2, 30, 3, 2, 16, device=device)
    q, k, v = (x.detach().requires_grad_() for x in together.permute(2, 0, 3, 1, 4))
    assert_equals_torch(q, k, v, causal=True)
    swapped = torch.randn(2, 1, 24, 30, device=device).transpose(2, 3).detach().requires_grad_()
    strided = torch.randn(2, 1, 30, 48, device=device)[..., ::2].detach().requires_grad_()
    one_head = torch.randn(1, 1, 30, 24, device=device).expand(2, 1, 30, 24)
    assert_equals_torch(swapped, strided, one_head)


def test_a_gradient_may_be_a_view_too(device: torch.device) -> None:
    q, k, v = (heads(device, torch.float32, 1, 1, 20, 16) for _ in "qkv")
    flash_attention(q, k, v).sum().backward()  # an expanded scalar
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    reference(*exact, -1, -1, 0.25).sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad.double(), exact[2].grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_sequences_of_unlike_lengths(device: torch.device, dtype: torch.dtype) -> None:
    starts_q = torch.tensor([0, 70, 70, 71, 101], dtype=torch.int32, device=device)  # one is empty, one a single token
    starts_k = torch.tensor([0, 33, 43, 140, 140], dtype=torch.int32, device=device)  # the last has no keys
    q, k, v = (heads(device, dtype, *shape) for shape in ((101, 4, 40), (140, 2, 40), (140, 2, 40)))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention_varlen(q, k, v, starts_q, starts_k, causal=True)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_varlen(q, k, v, starts_q, starts_k, -1, 0, 40**-0.5)

    assert_agrees(ours, theirs, (q, k, v), bound(q.dtype))


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (4, 0), (0, 0)])
def test_nothing_gives_nothing(device: torch.device, queries: int, keys: int) -> None:
    q, k = heads(device, torch.float32, 2, 1, queries, 8), heads(device, torch.float32, 2, 1, keys, 8)
    out = flash_attention(q, k, k, causal=True)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(q))
    assert q.grad is not None
    assert k.grad is not None
    assert q.grad.count_nonzero() == k.grad.count_nonzero() == 0


@pytest.mark.parametrize("causal", [False, True])
def test_sixteen_bits_lose_less_than_plain_attention_in_sixteen_bits(device: torch.device, causal: bool) -> None:
    """The bounds of flash-attention's own tests (test_flash_attn_bwd_overflow), with its inputs, most of them large."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 37, 32, device=device).mul(n).half().requires_grad_() for n in (5, 3, 3))
    g = torch.randn_like(q)

    def plain(*qkv: Tensor) -> Tensor:
        scores = qkv[0] @ (qkv[1] / 32**0.5).mT
        mask = torch.ones(37, 37, dtype=torch.bool, device=device).triu(1 if causal else 37)
        return scores.masked_fill(mask, -torch.inf).softmax(-1) @ qkv[2]

    def results(out: Tensor, *inputs: Tensor) -> list[Tensor]:
        return [x.detach().double() for x in (out, *torch.autograd.grad(out, inputs, g.to(out.dtype)))]

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = results(plain(*exact), *exact)
    ours, theirs = results(flash_attention(q, k, v, causal=causal), q, k, v), results(plain(q, k, v), q, k, v)
    lost = [[float((x - y).abs().max()) for x, y in zip(some, right, strict=True)] for some in (ours, theirs)]
    assert lost[0][0] <= 2 * lost[1][0]
    assert all(mine <= 5 * their + 1e-3 for mine, their in zip(*(some[1:] for some in lost), strict=True)), lost


def test_scores_of_hundreds_do_not_overflow(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 1, 50, 32, device=device, dtype=torch.float16) * 8 for _ in "qkv")
    out = flash_attention(q, k, v, scale=1.0)
    assert out.isfinite().all()


@pytest.mark.skipif(not INTERPRETED, reason="counted under the interpreter")
@pytest.mark.parametrize("window", [None, (60, 0)], ids=str)
def test_what_is_read_and_multiplied(device: torch.device, window: tuple[int, int] | None) -> None:
    """The docstring's formulas, block by block; no more blocks than a brute-force mask needs; no race."""
    tokens, width = 150, 32
    q, k, v = (heads(device, torch.float16, 1, 2, tokens, width) for _ in "qkv")
    sees = torch.ones(tokens, tokens).tril().triu(-60 if window else -tokens)

    def met(rows: int, columns: int) -> tuple[int, int, int]:
        """-> tiles with a pair that sees each other; their keys; their queries."""
        tiles = [
            (len(part), part.shape[1])
            for line in sees.split(rows)
            for part in line.split(columns, 1)
            if part.any()
        ]  # fmt: skip
        return len(tiles), sum(n for _, n in tiles), sum(m for m, _ in tiles)

    with counted(trace=True) as c:
        out = flash_attention(q, k, v, causal=True, window=window)
    tile = forward_tiles(width, q.dtype, q.device)
    tiles, columns, _ = met(tile.rows, tile.columns)
    size = 2 * tokens * width * 2
    assert c.loaded_from == {"q": size, "k": 2 * columns * width * 2, "v": 2 * columns * width * 2}
    assert c.stored_to == {"out": size, "lse": 2 * tokens * 4}
    assert c.flops == 2 * tiles * 4 * tile.rows * tile.columns * width
    assert not c.races()
    assert not c.outside

    with counted(trace=True) as c:
        out.backward(torch.randn_like(out))
    by_keys, by_queries = backward_tiles(width, q.dtype, q.device)
    tiles, _, rows = met(by_keys.rows, by_keys.columns)
    others, columns, _ = met(by_queries.rows, by_queries.columns)
    row, col = 2 * rows * width * 2, 2 * columns * width * 2
    assert c.loaded_from["q"] == row + size
    assert c.loaded_from["g"] == size + row + size  # delta, keys' kernel, queries' kernel
    assert c.loaded_from["out"] == size
    assert c.loaded_from["k"] == c.loaded_from["v"] == size + col
    assert c.stored_to == {"delta": 2 * tokens * 4, "dk": size, "dv": size, "dq": size}
    assert c.flops == 2 * 2 * width * (
        4 * tiles * by_keys.rows * by_keys.columns + 3 * others * by_queries.rows * by_queries.columns
    )
    assert not c.races()
    assert not c.outside


@contextmanager
def for_gpu(capability: int) -> Iterator[None]:
    """Tensors on "meta" are there."""
    token = REHEARSING.set(capability)
    try:
        yield
    finally:
        REHEARSING.reset(token)


def on_chip(stays: int, of: int, passes: int, stages: int, numbers: int = 0) -> int:
    """Bytes for tiles of bf16 heads of 256: `of` that stay, two loaded ahead, probabilities; fp32 `numbers` a row."""
    ahead = passes * (stages - 1)
    return 2 * (256 * (of * stays + 2 * ahead) + stays * passes) + 4 * numbers * ahead


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_the_widest_heads_fit_on_the_chip(capability: int) -> None:
    """What ptxas counts of the compiled kernels, to the byte, where they have no copy engine."""
    meta, bf16 = torch.device("meta"), torch.bfloat16
    x = torch.empty(0, device=meta, dtype=bf16)
    with for_gpu(capability):
        forward, (keys, queries) = forward_tiles(256, bf16, meta), backward_tiles(256, bf16, meta)
        stays, passes, by_keys = (sparse_tile(64, 256, x, *way) for way in ((False,), (True,), (True, True)))
        most = shared_memory(meta)
    assert on_chip(forward.rows, 1, forward.columns, forward.stages) <= most
    assert on_chip(keys.columns, 2, keys.rows, keys.stages, 2) <= most
    assert on_chip(queries.rows, 2, queries.columns, queries.stages) <= most
    assert on_chip(stays, 1, passes, 3) <= most
    assert on_chip(stays, 2, by_keys, 3, 2) <= most
    assert on_chip(stays, 2, passes, 2) <= most


def test_what_cannot_be_is_refused(device: torch.device) -> None:
    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(*shape, device=device, dtype=dtype)

    q, k = make(1, 4, 8, 16), make(1, 2, 9, 16)
    with pytest.raises(ValueError, match=r"flash_attention: 4 heads of q do not share 3 heads"):
        flash_attention(q, make(1, 3, 9, 16), make(1, 3, 9, 16))
    with pytest.raises(ValueError, match=r"k \[1, 2, 9, 16\] and v \[1, 2, 8, 16\] must have the same shape"):
        flash_attention(q, k, make(1, 2, 8, 16))
    with pytest.raises(ValueError, match="heads of q and k are 16 and 17 wide"):
        flash_attention(q, make(1, 2, 9, 17), make(1, 2, 9, 17))
    with pytest.raises(ValueError, match="300 wide; they must be equal, 1 to 256"):
        flash_attention(make(1, 1, 2, 300), make(1, 1, 2, 300), make(1, 1, 2, 300))
    with pytest.raises(ValueError, match=r"must be \[batch, heads, tokens, width\]"):
        flash_attention(q[0], k, k)
    with pytest.raises(TypeError, match=r"q is torch.float32, k torch.float16"):
        flash_attention(q, k.half(), k.half())
    with pytest.raises(TypeError, match=r"q is torch.int64"):
        flash_attention(q.long(), k.long(), k.long())
    with pytest.raises(ValueError, match="on meta"):
        flash_attention(q, k.to("meta"), k.to("meta"))
    with pytest.raises(ValueError, match=r"window is \(-2, 0\)"):
        flash_attention(q, k, k, window=(-2, 0))
    with pytest.raises(ValueError, match=r"scale is -1"):
        flash_attention(q, k, k, scale=-1.0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_beyond_all_tokens_is_none(device: torch.device, causal: bool) -> None:
    x = torch.randn(1, 1, 37, 8, device=device)
    plain = flash_attention(x, x, x, causal=causal)
    for far in (37, 2**31 - 1, 2**31, 10**12):  # beyond 2**31 a sum with a place would wrap around
        assert torch.equal(plain, flash_attention(x, x, x, causal=causal, window=(far, far)))


def test_a_longest_beyond_all_tokens_launches_no_more_programs(device: torch.device) -> None:
    x = torch.randn(5, 1, 8, device=device)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    plain = flash_attention_varlen(x, x, x, starts, starts)
    assert torch.equal(plain, flash_attention_varlen(x, x, x, starts, starts, longest_q=10**12, longest_k=10**12))


@pytest.mark.skipif(not INTERPRETED, reason="starts on a GPU are not read")
def test_starts_that_do_not_fit_are_refused(device: torch.device) -> None:
    x = torch.ones(5, 1, 8, device=device)
    right = torch.tensor([0, 5], dtype=torch.int32)
    for wrong in ([0, 4], [1, 5], [0, 6, 5]):
        starts = torch.tensor(wrong, dtype=torch.int32)
        both = right if len(wrong) == 2 else torch.tensor([0, 2, 5], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"starts_k is .*: it must rise from 0 to the 5 tokens given"):
            flash_attention_varlen(x, x, x, both, starts)
    with pytest.raises(ValueError, match="longest_k is 4, but a sequence has 5 tokens"):
        flash_attention_varlen(x, x, x, right, right, longest_q=5, longest_k=4)
    with pytest.raises(TypeError, match="starts_q must be int32"):
        flash_attention_varlen(x, x, x, right.long(), right.long())
    with pytest.raises(ValueError, match=r"must both be \[sequences \+ 1\]"):
        flash_attention_varlen(x, x, x, right, right[:1])


def test_the_gradient_has_no_gradient(device: torch.device) -> None:
    q = heads(device, torch.float32, 1, 1, 4, 16)
    (grad,) = torch.autograd.grad(flash_attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_what_gives_a_kernel_memory_keeps_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton holds the function that it was given last: an activation would live with it."""
    monkeypatch.setattr(flash_shapes, "INTERPRETED", False)
    x = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta")
    alive = weakref.ref(x)
    with for_gpu(90):
        assert flash_shapes.copy_engine(x)
    with for_gpu(120):
        assert not flash_shapes.copy_engine(x)
    del x
    assert alive() is None
