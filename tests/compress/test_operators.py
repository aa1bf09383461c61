"""Of every operator: its wire is as long as it says, and it loses no more than it says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operators import CONTRACTIONS, OPERATORS, squares, vectors
from torch import Tensor

from refimpl.compress.blocks import Blocks, pack_nibbles, unpack_nibbles
from refimpl.compress.compressor import pack, unpack
from refimpl.compress.feedback import ErrorFeedback
from refimpl.compress.sign import Sign, pack_bits, unpack_bits

every = pytest.mark.parametrize("name", OPERATORS)


@every
@given(x=vectors(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_the_wire_is_what_the_layout_says_and_comes_back(name: str, x: Tensor, dtype: torch.dtype) -> None:
    operator, x = OPERATORS[name], x.to(dtype)
    before = x.clone()
    wire = operator.compress(x)
    assert [(len(part), part.dtype) for part in wire] == operator.layout(len(x), dtype)
    assert sum(part.nbytes for part in wire) == operator.wire_bytes(len(x), dtype)
    assert torch.equal(x, before)
    back = unpack(pack(wire), operator.layout(len(x), dtype))
    decompressed = operator.decompress(wire, len(x), dtype)
    assert decompressed.dtype == dtype
    assert torch.equal(decompressed, operator.decompress(back, len(x), dtype))
    total = torch.ones(len(x))
    operator.add_to(total, wire, -1.0) if len(x) else None
    assert torch.allclose(total, 1 - operator.decompress(wire, len(x)))


@pytest.mark.parametrize("name", CONTRACTIONS)
@given(x=vectors(least=1))
def test_a_contraction_loses_no_more_than_its_bound(name: str, x: Tensor) -> None:
    operator = CONTRACTIONS[name]
    assert 0 <= operator.error_bound(len(x)) < 1
    lost = squares(operator.decompress(operator.compress(x), len(x)) - x)
    assert lost <= (operator.error_bound(len(x)) + 1e-5) * squares(x)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_bound_of_rounding_to_blocks_is_reached(bits: int) -> None:
    operator = Blocks(bits, block=64)
    x = torch.full((64,), 0.5 / operator.largest)
    x[5] = 1.0
    lost = squares(operator.decompress(operator.compress(x), 64) - x)
    assert lost == pytest.approx(operator.error_bound(64) * squares(x), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in CONTRACTIONS])
@given(x=vectors(least=1, most=64))
def test_an_unbiased_operator_is_right_on_average(name: str, x: Tensor) -> None:
    operator, draws = OPERATORS[name], 400
    lost = torch.stack([operator.decompress(operator.compress(x, t), len(x), turn=t) - x for t in range(draws)])
    variance = lost.double().square().sum(1).mean()
    assert variance <= (operator.error_bound(len(x)) * 1.2 + 1e-9) * squares(x)
    spread = (lost.double().square().mean(0) / draws).sqrt()  # of the mean over draws, each number for itself
    assert (lost.double().mean(0).abs() <= 5 * spread + 1e-5 * x.abs().max()).all()


@every
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 137, 299])
def test_what_is_not_finite_does_not_come_back_finite(name: str, bad: float, place: int) -> None:
    x = torch.randn(300)
    x[place] = bad
    operator = OPERATORS[name]
    assert not operator.decompress(operator.compress(x), 300).isfinite().all()


@every
def test_zeros_stay_zeros(name: str) -> None:
    operator = OPERATORS[name]
    assert not operator.decompress(operator.compress(torch.zeros(77)), 77).any()


@given(x=vectors(), steps=st.integers(1, 6))
@every
def test_with_feedback_nothing_is_lost(name: str, x: Tensor, steps: int) -> None:
    """Sent + error = the sum of all that was to be sent."""
    feedback = ErrorFeedback(OPERATORS[name], len(x))
    sent = torch.zeros(len(x)).double()
    for turn in range(steps):
        wire = feedback.compress(x * (turn + 1), turn)
        sent += OPERATORS[name].decompress(wire, len(x), turn=turn)
        feedback.accept()
    total = x.double() * (steps * (steps + 1) // 2)
    assert torch.allclose(sent + feedback.error, total, atol=1e-4 * float(x.abs().max()) * steps if len(x) else 0)


@every
def test_what_nobody_used_is_taken_back(name: str) -> None:
    feedback = ErrorFeedback(OPERATORS[name], 50)
    feedback.compress(torch.randn(50))
    feedback.accept()
    kept = feedback.error.clone()
    feedback.compress(torch.full((50,), float("nan")), 1)
    feedback.compress(torch.randn(50), 2)
    assert torch.equal(feedback.state_dict()["error"], kept)
    feedback.revert()
    feedback.accept()
    assert torch.equal(feedback.error, kept)
    feedback.compress(torch.randn(50), 3)
    now = feedback.error.clone()
    feedback.revert(10, 20)
    assert torch.equal(feedback.error[10:20], kept[10:20])
    assert torch.equal(feedback.error[20:], now[20:])


@given(st.integers(0, 70), st.integers(0, 2**31))
def test_bits_and_nibbles(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.rand(n, generator=generator) < 0.5
    packed = pack_bits(bits)
    assert [bool(byte >> i & 1) for byte in packed.tolist() for i in range(8)][:n] == bits.tolist()
    assert torch.equal(unpack_bits(packed, torch.tensor([3.0]))[:n], torch.where(bits, 3.0, -3.0))
    codes = torch.randint(-7, 8, (n,), generator=generator, dtype=torch.int8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes))[:n], codes.float())


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        Sign().compress(torch.arange(3))
    with pytest.raises(ValueError, match=r"\(2, 2\).*flat"):
        Blocks().compress(torch.ones(2, 2))
    with pytest.raises(ValueError, match="8 or 4"):
        Blocks(bits=2)
    with pytest.raises(ValueError, match="at least 1"):
        Blocks(block=0)
    with pytest.raises(ValueError, match=r"\[3\].*\[4\]"):
        ErrorFeedback(Sign(), 3).compress(torch.ones(4))
