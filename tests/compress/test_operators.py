"""Of every operator: its wire is as long as it says, and it loses no more than it says."""

import copy
import math
import pickle
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operators import ALWAYS, CONTRACTIONS, OPERATORS, UNBIASED, squares, vectors
from torch import Tensor

from refimpl.compress.blocks import Blocks, pack_nibbles, unpack_nibbles
from refimpl.compress.compressor import pack, unpack
from refimpl.compress.feedback import ErrorFeedback
from refimpl.compress.powersgd import PowerSGD
from refimpl.compress.randomk import RandomK
from refimpl.compress.sign import Sign, pack_bits, unpack_bits
from refimpl.compress.topk import TopK

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
    back = unpack(pack(wire, x.device), operator.layout(len(x), dtype))
    decompressed = operator.decompress(wire, len(x), dtype)
    assert decompressed.dtype == dtype
    assert torch.equal(decompressed, operator.decompress(back, len(x), dtype))
    if len(x):
        total = torch.zeros(len(x))
        operator.add_to(total, wire, -1.0)
        assert torch.equal(total, -operator.decompress(wire, len(x)))


@pytest.mark.parametrize("name", ALWAYS)
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


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_bound_of_blocks_is_the_worst_block(bits: int, stochastic: bool) -> None:
    """One number is the largest, the others lie a part f of the way from one code to the next."""
    operator, others = Blocks(bits, 33, stochastic), 32
    f = torch.linspace(0, 1, 1001, dtype=torch.float64)
    lost = f * (1 - f) if stochastic else torch.minimum(f, 1 - f).square()
    worst = (others * lost / (operator.largest**2 + others * f.square())).max()
    assert operator.error_bound(100) == pytest.approx(worst.item(), rel=1e-3)


def test_rounding_is_to_the_nearest_code() -> None:
    x, back, operator = torch.linspace(-7, 7, 1001), torch.zeros(1001), Blocks(4, 1001)  # a code is 1 wide
    operator.add_to(back, operator.compress(x))
    assert (x - back).abs().max() <= 0.5 + 1e-5


@pytest.mark.parametrize("name", ["random-k", "PowerSGD"])
@hypothesis.settings(max_examples=10)
@given(x=vectors(least=1, most=64))
def test_a_contraction_on_average_is_one(name: str, x: Tensor) -> None:
    operator, draws = OPERATORS[name], 300
    lost = [squares(operator.decompress(operator.compress(x, t), len(x), turn=t) - x) for t in range(draws)]
    assert max(lost) <= squares(x) * (1 + 1e-5)
    mean, spread = np.mean(lost), np.std(lost) / draws**0.5
    assert mean <= (operator.error_bound(len(x)) + 1e-5) * squares(x) + 5 * spread


@pytest.mark.parametrize("name", UNBIASED)
@hypothesis.settings(max_examples=15)
@given(x=vectors(least=1, most=64))
def test_an_unbiased_operator_is_right_on_average(name: str, x: Tensor) -> None:
    operator, draws = OPERATORS[name], 400
    lost = torch.stack([operator.decompress(operator.compress(x, t), len(x), turn=t) - x for t in range(draws)])
    variance = lost.double().square().sum(1).mean()
    assert variance <= (operator.error_bound(len(x)) * 1.2 + 1e-9) * squares(x)
    assert squares(lost.mean(0)) <= (16 * operator.error_bound(len(x)) / draws + 1e-9) * squares(x)


@every
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 137, 299])
def test_what_is_not_finite_does_not_come_back_finite(name: str, bad: float, place: int) -> None:
    x = torch.randn(300)
    x[place] = bad
    operator = OPERATORS[name]
    assert not operator.decompress(operator.compress(x), 300).isfinite().all()


@pytest.mark.parametrize("name", [name for name in OPERATORS if name.startswith("int")])
def test_the_largest_finite_numbers_stay_finite(name: str) -> None:
    """As in a mask of torch.finfo(torch.float32).min that is gathered in int8."""
    most = torch.finfo(torch.float32).max
    for x in (torch.tensor([-most]), torch.tensor([most, 1.0, -most, 0.0, most / 2] * 20)):
        back = OPERATORS[name].decompress(OPERATORS[name].compress(x), len(x))
        assert back.isfinite().all()
        assert back[0] == pytest.approx(x[0].item(), rel=1e-3)


@every
def test_zeros_stay_zeros(name: str) -> None:
    operator = OPERATORS[name]
    assert not operator.decompress(operator.compress(torch.zeros(77)), 77).any()


@given(x=vectors(), steps=st.integers(1, 6))
@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "random-k rescaled"])
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


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_what_nobody_used_is_taken_back(name: str) -> None:
    feedback = ErrorFeedback(OPERATORS[name], 50)
    feedback.compress(torch.randn(50))
    feedback.accept()
    kept = feedback.error.clone()
    feedback.compress(torch.full((50,), float("nan")), 1)
    feedback.compress(torch.randn(50), 2)
    assert torch.equal(feedback.accepted(), kept)
    feedback.revert()
    feedback.accept()
    assert torch.equal(feedback.error, kept)
    feedback.compress(torch.randn(50), 3)
    now = feedback.error.clone()
    feedback.revert(10, 20)
    assert torch.equal(feedback.error[10:20], kept[10:20])
    assert torch.equal(feedback.error[20:], now[20:])
    feedback.rescale(0.5)  # as after a step that overflows, and then after another one
    feedback.compress(torch.randn(50), 4)
    feedback.revert()
    assert torch.equal(feedback.error, kept / 2)


@given(st.integers(0, 70), st.integers(0, 2**31))
def test_bits_and_nibbles(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.rand(n, generator=generator) < 0.5
    packed = pack_bits(bits)
    assert [bool(byte >> i & 1) for byte in packed.tolist() for i in range(8)][:n] == bits.tolist()
    assert torch.equal(unpack_bits(packed, torch.tensor([3.0]))[:n], torch.where(bits, 3.0, -3.0))
    codes = torch.randint(-7, 8, (n,), generator=generator, dtype=torch.int8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes))[:n], codes.float())


@given(x=vectors(least=1), ratio=st.sampled_from([0.001, 0.07, 0.5, 1.0]))
def test_no_choice_of_k_numbers_loses_less_than_the_largest(x: Tensor, ratio: float) -> None:
    operator = TopK(ratio)
    values, places = operator.compress(x)
    assert len(values) == max(1, math.ceil(Fraction(str(ratio)) * len(x)))
    assert len(set(places.tolist())) == len(places)
    assert torch.equal(x[places.long()], values)
    assert torch.equal(values.abs().sort(descending=True).values, x.abs().sort(descending=True).values[: len(values)])


@given(n=st.integers(1, 300), turn=st.integers(0, 2**40), seed=st.integers(0, 5))
def test_random_places_are_a_function_of_seed_and_turn(n: int, turn: int, seed: int) -> None:
    """Two ranks, which share nothing but the seed, take the same places; another turn takes others."""
    first, second = RandomK(0.5, seed), RandomK(0.5, seed)
    places = [r.places(n, turn, torch.device("cpu")) for r in (first, second)]
    assert torch.equal(*places)
    assert len(places[0].unique()) == len(places[0]) == max(1, math.ceil(n / 2))
    if n > 100:
        assert not torch.equal(places[0], first.places(n, turn + 1, torch.device("cpu")))
        for other in (turn, turn - 1):  # nor is it the sum of both that counts
            assert not torch.equal(places[0], RandomK(0.5, seed + 1).places(n, other, torch.device("cpu")))


@every
def test_an_operator_is_a_value(name: str) -> None:
    """Also after use: configurations are compared, copied and sent to ranks."""
    OPERATORS[name].compress(torch.randn(10))
    assert pickle.loads(pickle.dumps(OPERATORS[name])) == OPERATORS[name] == copy.deepcopy(OPERATORS[name])


def test_a_matrix_of_low_rank_comes_back_whole() -> None:
    x = (torch.randn(20, 2) @ torch.randn(2, 20)).view(-1)
    lost = PowerSGD(rank=2).decompress(PowerSGD(rank=2).compress(x), 400) - x
    assert squares(lost) < 1e-9 * squares(x)


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        Sign().compress(torch.arange(3))
    with pytest.raises(ValueError, match=r"\(2, 2\).*flat"):
        Blocks().compress(torch.ones(2, 2))
    with pytest.raises(ValueError, match="8 or 4"):
        Blocks(bits=2)
    with pytest.raises(TypeError, match="x is list"):
        Sign().compress([1.0])  # type: ignore[arg-type]
    for wrong in (0, 2.5):
        with pytest.raises(ValueError, match="a whole number, 1 or more"):
            Blocks(block=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a whole number, 1 or more"):
            PowerSGD(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[3\].*\[4\]"):
        ErrorFeedback(Sign(), 3).compress(torch.ones(4))
    with pytest.raises(ValueError, match=r"RandomK.*4 times.*without feedback"):
        ErrorFeedback(RandomK(0.2, rescaled=True), 100)
    for operator in (TopK, RandomK):
        for ratio in (0, 1.1, -1, float("nan"), "0.1"):
            with pytest.raises(ValueError, match="above 0 and at most 1"):
                operator(ratio)  # type: ignore[arg-type]
