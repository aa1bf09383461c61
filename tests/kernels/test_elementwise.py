"""SwiGLU, GeGLU, rotary positions and dropout beside float64 and beside others' formulas."""

import pytest
import torch
from agreement import assert_agrees

from refimpl.kernels import dropout as drop
from refimpl.kernels import glu
from refimpl.kernels import rotary as turn
from refimpl.kernels.dropout import dropout, philox
from refimpl.kernels.glu import geglu, swiglu
from refimpl.kernels.rotary import rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "tanh", "none"])
def test_a_gated_unit_equals_float64(device: torch.device, dtype: torch.dtype, activation: str) -> None:
    gate, up = (torch.randn(3, 7, 21, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    assert_agrees(
        lambda a, b: swiglu(a, b) if activation == "silu" else geglu(a, b, activation),
        lambda a, b: glu.reference(a, b, activation),
        (gate, up),
    )


def test_gate_and_up_may_be_halves_of_one_tensor(device: torch.device) -> None:
    both = torch.randn(5, 2 * 1030, device=device, requires_grad=True)
    assert_agrees(lambda x: swiglu(*x.chunk(2, -1)), lambda x: glu.reference(*x.chunk(2, -1)), (both,))
    assert_agrees(
        lambda x: geglu(x.t()[:9], x.t()[9:18]), lambda x: glu.reference(x.t()[:9], x.t()[9:18], "tanh"), (both,)
    )


def test_a_gated_unit_of_one_long_row_has_programs_enough() -> None:
    """CUDA's grids are 65,535 wide in all dimensions but the first."""
    assert all(programs <= 65535 for programs in glu.launch(1, 1 << 28)[0][1:])


def test_what_a_gated_unit_refuses(device: torch.device) -> None:
    x = torch.randn(3, 4, device=device)
    with pytest.raises(ValueError, match=r"swiglu: shapes must be equal, but gate \[3, 4\], up \[3, 3\]"):
        swiglu(x, x[:, :3])
    with pytest.raises(ValueError, match="they must have one dtype"):
        geglu(x, x.half())
    with pytest.raises(ValueError, match="approximate is 'erf'"):
        geglu(x, x, "erf")
    assert swiglu(x[:0], x[:0]).shape == (0, 4)


def angles(length: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, device=device)[:, None] * 100 ** (-torch.arange(count, device=device) / max(count, 1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "count"), [((2, 3, 5, 8), 4), ((1, 40, 3, 14), 5), ((2, 1, 4, 2), 1)], ids=str)
def test_rotary_equals_float64(
    device: torch.device, shape: tuple[int, ...], count: int, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "ELEMENTS", 128)  # several blocks of heads
    table = angles(shape[2], count, device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        assert_agrees(rotary, turn.reference, (x, table.cos(), table.sin(), interleaved))


def test_rotary_of_any_strides_and_a_table_for_each_sequence(device: torch.device) -> None:
    base = torch.randn(2, 5, 3, 8, device=device)
    table = torch.randn(2, 5, 4, device=device)
    for x in (base.transpose(1, 2), base.transpose(1, 2)[..., :8:1].contiguous()[:, :, :, :]):
        leaf = x.detach().requires_grad_()
        assert_agrees(rotary, turn.reference, (leaf, table.cos(), table.sin()))
    turned = rotary(base.transpose(1, 2), table.cos(), table.sin())
    assert turned.stride() == base.transpose(1, 2).stride()
    sliced = torch.randn(2, 3, 5, 20, device=device)[..., ::2].requires_grad_()
    assert_agrees(rotary, turn.reference, (sliced, table.cos(), table.sin()))


def test_rotary_is_the_complex_product_of_the_paper(device: torch.device) -> None:
    """Su et al., equation 12, in complex numbers; and Llama's form by its own `rotate_half`."""
    x, table = torch.randn(2, 3, 5, 8, device=device), angles(5, 4, device)
    paper = torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(table), table)
    )
    torch.testing.assert_close(rotary(x, table.cos(), table.sin(), interleaved=True), paper.flatten(-2))
    cos, sin = (torch.cat((t, t), -1) for t in (table.cos(), table.sin()))
    half = torch.cat((-x[..., 4:], x[..., :4]), -1)
    torch.testing.assert_close(rotary(x, table.cos(), table.sin()), x * cos + half * sin)


def test_what_rotary_refuses(device: torch.device) -> None:
    x, table = torch.randn(2, 3, 5, 8, device=device), angles(5, 4, device)
    with pytest.raises(ValueError, match=r"must be \[5, R\] or \[2, 5, R\] with R at most 4"):
        rotary(x, table[:4], table[:4])
    with pytest.raises(ValueError, match=r"x must be \[B, H, T, D\]"):
        rotary(x[0], table, table)
    assert rotary(x[:, :0], table, table).shape == (2, 0, 5, 8)


@pytest.mark.parametrize("size", [1, 1000, 4097, 9000])
def test_dropout_equals_its_reference(device: torch.device, size: int) -> None:
    x = torch.randn(size, device=device, requires_grad=True)
    assert_agrees(dropout, drop.reference, (x, 0.3, 12345678901))


def test_philox_gives_the_known_answers() -> None:
    """Random123's kat_vectors for philox4x32 with ten rounds: counter and key all 0, then (the first words) given."""
    zero = philox(0, torch.tensor([0]))[:, 0]
    assert [f"{word:08x}" for word in zero.tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_the_gradient_has_the_mask_of_the_result(device: torch.device) -> None:
    x = torch.ones(50, 90, device=device).t().requires_grad_()  # not contiguous
    y = dropout(x, 0.5, 7)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y)
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert abs((y > 0).double().mean() - 0.5) < 4 * 0.5 / 4500**0.5
    assert torch.equal(dropout(x, 0.5, 7), y)
    assert not torch.equal(dropout(x, 0.5, 8), y)
    assert torch.equal(dropout(x.double(), 0.5, 7), y.double())  # torch's operators draw the same


def test_what_is_dropped_is_gone_whatever_it_was(device: torch.device) -> None:
    """inf and NaN too, which a product with 0 would keep; by torch's operators as by the kernel."""
    x = torch.full((4000,), torch.inf, device=device)
    x[::2] = torch.nan
    for y in (dropout(x, 0.5, 3), drop.reference(x, 0.5, 3)):
        assert torch.equal(y == 0, ~drop.mask(x.shape, 0.5, 3, x.device))
    assert dropout(x, 1.0, 3).count_nonzero() == 0


def test_dropout_at_its_ends(device: torch.device) -> None:
    x = torch.randn(9, device=device, requires_grad=True)
    assert dropout(x, 0.0, 1) is x
    assert dropout(x, 0.5, 1, training=False) is x
    assert dropout(x, 1.0, 1).count_nonzero() == 0
    assert dropout(x[:0], 0.5, 1).shape == (0,)
    for p, seed in ((-0.1, 0), (1.1, 0), (0.5, -1)):
        with pytest.raises(ValueError, match="must be between 0 and"):
            dropout(x, p, seed)
