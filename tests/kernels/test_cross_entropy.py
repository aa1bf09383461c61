"""Cross-entropy beside float64, of logits and of a linear layer that never makes them all."""

from typing import Any

import pytest
import torch
from agreement import assert_agrees
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from refimpl.kernels import cross_entropy as room
from refimpl.kernels import linear_cross_entropy as linear
from refimpl.kernels.count import counted
from refimpl.kernels.cross_entropy import cross_entropy, reference
from refimpl.kernels.language import INTERPRETED
from refimpl.kernels.linear_cross_entropy import linear_cross_entropy

OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none", "ignore_index": 2},
    {"ignore_index": 2, "label_smoothing": 0.1},
    {"z_loss": 0.01, "label_smoothing": 1.0},
]


def bound_to(function: Any, options: dict[str, Any]) -> Any:
    return lambda *inputs: function(*inputs, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_float64(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits = torch.randn(2, 9, 37, device=device).mul(4).to(dtype).requires_grad_()
    targets = torch.randint(37, (2, 9), device=device)
    targets[0, :3] = 2
    assert_agrees(bound_to(cross_entropy, options), bound_to(reference, options), (logits, targets))


def test_a_row_of_several_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BLOCK", 32)
    logits = torch.randn(5, 101, device=device).mul(10)
    logits[0, :64] = float("-inf")
    logits[1, 32:] = -1e30
    targets = torch.tensor([70, 0, 31, 32, 100], device=device)
    assert_agrees(cross_entropy, reference, (logits.requires_grad_(), targets), bound=1e-5)


def test_any_strides(device: torch.device) -> None:
    base = torch.randn(11, 8, 6, device=device)
    for logits in (base.permute(1, 2, 0), base[::2, :, :5], base[:, 0]):
        targets = torch.randint(logits.shape[-1], logits.shape[:-1], device=device)
        assert_agrees(cross_entropy, reference, (logits.detach().requires_grad_(), targets))
    assert_agrees(cross_entropy, reference, (base.requires_grad_(), torch.ones(8, 11, device=device).long().t()))


def test_targets_in_32_bits_and_one_row(device: torch.device) -> None:
    logits = torch.randn(7, device=device, requires_grad=True)
    assert_agrees(cross_entropy, reference, (logits, torch.tensor(3, device=device, dtype=torch.int32)))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_mean_of_no_row_is_nan_and_a_sum_is_0(device: torch.device) -> None:
    targets = torch.full((4,), -100, device=device)
    for logits in (torch.randn(4, 5, device=device, requires_grad=True), torch.zeros(4, 5, device=device)[:0]):
        aims = targets[: len(logits)]
        assert cross_entropy(logits, aims).isnan()
        assert cross_entropy(logits, aims, reduction="sum") == 0


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("by", ["kernel", "torch"])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_a_mean_of_no_row_has_no_gradient(
    device: torch.device, by: str, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's: a batch of padding alone leaves the weights as they are, not NaN."""
    if by == "torch":
        monkeypatch.setattr(linear, "takes", lambda *tensors: False)
        monkeypatch.setattr(room, "takes", lambda *tensors: False)
    x, weight = torch.randn(3, 4, device=device).requires_grad_(), torch.randn(5, 4, device=device).requires_grad_()
    ignored = torch.full((3,), -100, device=device)
    for loss in (
        linear_cross_entropy(x, weight, ignored, z_loss=z_loss),
        cross_entropy(x @ weight.T, ignored, z_loss=z_loss),
    ):
        assert loss.isnan()
        assert all(g.count_nonzero() == 0 for g in torch.autograd.grad(loss, (x, weight)))


def test_what_cannot_be_is_refused(device: torch.device) -> None:
    logits, targets = torch.randn(3, 5, device=device), torch.tensor([0, 1, 4], device=device)
    with pytest.raises(ValueError, match=r"logits \[3, 5\] take targets \[3\], not \[2\]"):
        cross_entropy(logits, targets[:2])
    with pytest.raises(TypeError, match=r"targets is torch.float32"):
        cross_entropy(logits, targets.float())
    with pytest.raises(ValueError, match="reduction is 'average'"):
        cross_entropy(logits, targets, reduction="average")
    with pytest.raises(ValueError, match=r"label_smoothing is 1.5"):
        cross_entropy(logits, targets, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"would need each row's gradient apart"):
        linear_cross_entropy(logits, torch.randn(9, 5, device=device), targets, reduction="none")
    with pytest.raises(ValueError, match=r"x \[3, 5\] does not fit weight \[V, D\] \[9, 4\]"):
        linear_cross_entropy(logits, torch.randn(9, 4, device=device), targets)


def test_a_target_that_is_no_class(device: torch.device) -> None:
    logits, targets = torch.randn(3, 5, device=device), torch.tensor([0, 5, -1], device=device)
    if device.type == "cpu":
        with pytest.raises(IndexError, match=r"cross_entropy: target 5 at \[1\] is none of the 5 classes \(0 to 4, or"):
            cross_entropy(logits, targets)
        with pytest.raises(IndexError, match=r"cross_entropy: target -1 at \[0, 2\] is none"):
            cross_entropy(logits.double()[None], targets.clamp(max=4)[None])  # torch's operator
        with pytest.raises(IndexError, match=r"linear_cross_entropy: target 5 at \[1, 0\] is none of the 5 classes"):
            linear_cross_entropy(logits[:, None], torch.randn(5, 5), targets[:, None])
        cross_entropy(logits, targets.clamp(max=4), ignore_index=-1)
    else:
        losses = cross_entropy(logits, targets, reduction="none")
        assert losses.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("reduction") != "none"], ids=str)
def test_linear_equals_all_logits_in_float64(
    device: torch.device, with_bias: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "LEAST", 4)
    x = torch.randn(3, 5, 8, device=device, requires_grad=True)
    weight = torch.randn(37, 8, device=device, requires_grad=True)
    bias = torch.randn(37, device=device, requires_grad=True) if with_bias else None
    targets = torch.randint(37, (3, 5), device=device)
    targets[0, :3] = 2
    arguments = (x, weight, targets, bias)
    assert_agrees(bound_to(linear_cross_entropy, options), bound_to(linear.reference, options), arguments, bound=1e-5)


def test_linear_in_bf16_and_with_frozen_weight(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LEAST", 3)
    x = torch.randn(8, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(40, 16, device=device, dtype=torch.bfloat16)
    assert_agrees(
        linear_cross_entropy, linear.reference, (x, weight, torch.arange(8, device=device)), bound=4e-2
    )  # logits are bf16 too


def test_linear_under_autocast(device: torch.device) -> None:
    x = torch.randn(6, 8, device=device, requires_grad=True)
    weight = torch.randn(11, 8, device=device, requires_grad=True)
    bias = torch.randn(11, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_agrees(linear_cross_entropy, linear.reference, (x, weight, torch.arange(6, device=device), bias), 4e-2)
        half = x.detach().bfloat16().requires_grad_()  # as a layer before it would give
        linear_cross_entropy(half, weight, torch.arange(6, device=device)).backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("reduction") != "none"], ids=str)
def test_linear_by_torchs_operators(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without the interpreter: its gradient is a formula there."""
    monkeypatch.setattr(linear, "LEAST", 4)
    monkeypatch.setattr(linear, "takes", lambda *tensors: False)
    x, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(37, 8, requires_grad=True)
    bias = torch.randn(37, requires_grad=True)
    targets = torch.randint(37, (3, 5))
    targets[0, :3] = 2
    arguments = (x, weight, targets, bias)
    assert_agrees(bound_to(linear_cross_entropy, options), bound_to(linear.reference, options), arguments, bound=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own call
def test_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced: by FakeTensors, which have no numbers to look at, and by torch.compile's front end."""
    monkeypatch.setattr(linear, "takes", lambda *tensors: False)
    monkeypatch.setattr(room, "takes", lambda *tensors: False)
    made = [torch.randn(6, 8), torch.randn(11, 8), torch.randint(11, (6,))]
    with FakeTensorMode() as mode:
        x, weight, targets = (mode.from_tensor(t) for t in made)
        for loss in (
            linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets),
            cross_entropy(x @ weight.T, targets),
        ):
            dx, dweight = torch.autograd.grad(loss, (x, weight))
            assert (loss.shape, dx.shape, dweight.shape) == ((), (6, 8), (11, 8))
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in made]
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves), leaves[:2])
    for ours, theirs in zip(found, torch.autograd.grad(linear_cross_entropy(*leaves), leaves[:2]), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("interpreted", [True, False])
def test_linear_never_makes_all_logits(
    device: torch.device, interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kernel or, on a CPU, by torch: the largest tensor made is a chunk's, or a weight's gradient."""
    if not interpreted:
        monkeypatch.setattr("refimpl.kernels.linear_cross_entropy.takes", lambda *tensors: False)
    monkeypatch.setattr(linear, "LEAST", 2)
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **kwargs or {})
            sizes.extend(
                t.numel() for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)
            )
            return result

    x = torch.randn(64, 4, device=device, requires_grad=True)
    weight = torch.randn(32, 4, device=device, requires_grad=True)
    with Watch():
        linear_cross_entropy(x, weight, torch.zeros(64, device=device, dtype=torch.long))
    assert 0 < max(sizes) <= 64 * 4 < 64 * 32


@pytest.mark.skipif(not INTERPRETED, reason="counted under the interpreter")
def test_linear_does_six_operations_and_reads_its_logits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 N D V in the forward pass and none in backward; a chunk's logits are read twice and written in their place."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports triton's own functions

    monkeypatch.setattr(linear, "LEAST", 4)
    n, d, v = 10, 8, 37
    x, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    with FlopCounterMode(display=False) as products, counted(trace=True) as c:
        loss = linear_cross_entropy(x, weight, torch.randint(v, (n,)))
    assert products.get_total_flops() == 6 * n * d * v
    assert c.loaded_from["logits"] == 4 * (2 * n * v + n)  # and each row's target once more
    assert c.stored_to == {"grad": 4 * n * v, "losses": 4 * n}
    assert not c.races()
    assert not c.outside
    with FlopCounterMode(display=False) as products, counted() as c:
        loss.backward()
    assert products.get_total_flops() == c.launches == 0


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_linear_of_nothing(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(5, 8, device=device, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.zeros(shape[:-1], device=device).long(), reduction="sum")
    loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0
