"""AdamW over a shard beside refimpl's Adam, and the norm of many tensors beside float64."""

import math
from typing import Any

import pytest
import torch

from refimpl.kernels import adamw as room
from refimpl.kernels import multi_norm as norms
from refimpl.kernels.adamw import adamw
from refimpl.kernels.multi_norm import multi_norm
from refimpl.optim.adam import Adam

BOUND = 4e-7  # of the greatest entry: a few roundings of fp32, which a GPU and a CPU do not do alike


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, bound: float = BOUND) -> None:
    assert float((ours.double() - theirs.double()).abs().max()) <= bound * float(theirs.abs().max()) + 1e-12


@pytest.mark.parametrize("options", [{}, {"adam_w": False}, {"bias_correction": False}], ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_five_steps_equal_adams(
    device: torch.device, options: dict[str, Any], grad_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "BLOCK", 512)
    settings = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    theirs = torch.nn.Parameter(torch.randn(1301))
    correct = options.get("bias_correction", True)
    adam = Adam([theirs], **settings, adam_w_mode=options.get("adam_w", True), bias_correction=correct)
    ours, low = theirs.detach().clone().to(device), torch.empty(1301, dtype=torch.bfloat16, device=device)
    first, second = torch.zeros(2, 1301, device=device).unbind()
    for step in range(1, 6):
        grad = torch.randn(1301).to(grad_dtype)
        theirs.grad = grad.float()
        adam.step()
        number = torch.tensor(float(step) if correct else math.inf, device=device)
        adamw(
            ours, grad.to(device), first, second, number, settings["lr"], settings["betas"], 1e-8, 0.1,
            adam_w=options.get("adam_w", True), low=low,
        )  # fmt: skip
        assert_near(ours.cpu(), theirs.detach())
        assert_near(low.cpu(), ours.cpu(), 2**-7)
    state = adam.state[theirs]
    assert_near(first.cpu(), state["exp_avg"])
    assert_near(second.cpu(), state["exp_avg_sq"])


@pytest.mark.parametrize("overflow", [None, 0.0, 1.0])
def test_adam_hands_its_parameters_to_the_kernel(device: torch.device, overflow: float | None) -> None:
    """As on a GPU; what the kernel cannot take stays for torch's."""
    twins = []
    for _ in range(2):
        torch.manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(9, 7, device=device)) for _ in range(3)]
        params[1].data = params[1].data.double()
        adam = Adam(params, lr=0.1, weight_decay=0.1)
        for p in params:
            p.grad = torch.randn_like(p)
        if overflow is not None:
            adam.grad_scale, adam.found_inf = torch.tensor(4.0, device=device), torch.tensor(overflow, device=device)
        twins.append((adam, params))
    (ours, taken), (theirs, expected) = twins
    lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
    torch.optim.Adam._init_group(ours, ours.param_groups[0], *lists)
    with torch.no_grad():
        ours.update(ours.param_groups[0], *lists)
    assert [p is taken[1] for p in lists[0]] == [True]
    assert all(len(column) == 1 for column in (lists[1], lists[2], lists[3], lists[5]))
    if device.type == "cuda":
        return  # there Adam itself takes the kernel
    theirs.step()
    for a, b in ((taken[0], expected[0]), (taken[2], expected[2])):
        assert_near(a.detach(), b.detach())
        assert torch.equal(ours.state[a]["step"], theirs.state[b]["step"])


def shard(device: torch.device, size: int = 70) -> list[torch.Tensor]:
    return [torch.randn(size, device=device).abs() for _ in range(4)]


def test_the_scale_divides_the_gradient_and_an_overflow_changes_nothing(device: torch.device) -> None:
    weights, grad, first, second = shard(device)
    one, low = torch.ones((), device=device), torch.zeros(70, device=device, dtype=torch.float16)
    before = [t.clone() for t in (weights, first, second, low)]
    lr = torch.tensor(0.1, device=device)
    scale = torch.tensor(8.0, device=device)
    adamw(weights, grad * 8, first, second, one, lr, low=low, grad_scale=scale, found_inf=one)
    assert all(torch.equal(a, b) for a, b in zip((weights, first, second, low), before, strict=True))
    plain = [t.clone() for t in (weights, first, second)]
    adamw(plain[0], grad, *plain[1:], one, 0.1)
    scaled = grad * 8
    adamw(weights, scaled, first, second, one, lr, low=low, grad_scale=scale, found_inf=one * 0)
    assert torch.equal(scaled, grad * 8)
    for ours, theirs in zip((weights, first, second), plain, strict=True):
        assert_near(ours, theirs)


def test_a_rate_that_the_host_has_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on the CPU beside weights on a GPU, as torch's fused optimizers take it: no kernel can read it there."""
    given = []
    monkeypatch.setattr(room, "reference", lambda *arguments: given.append(arguments[5]))
    adamw(*(t.to("meta") for t in shard(torch.device("cpu"))), torch.ones((), device="meta"), torch.tensor(0.5))
    assert given == [0.5]
    assert isinstance(given[0], float)


def test_what_adamw_refuses(device: torch.device) -> None:
    weights, grad, first, second = shard(device)
    one = torch.ones((), device=device)
    with pytest.raises(TypeError, match="weights must be contiguous float32"):
        adamw(weights.half(), grad, first, second, one, 0.1)
    with pytest.raises(ValueError, match=r"shapes must be equal.*grad \[69\]"):
        adamw(weights, grad[1:], first, second, one, 0.1)
    with pytest.raises(TypeError, match="step must be one float32"):
        adamw(weights, grad, first, second, torch.ones((), dtype=torch.int64, device=device), 0.1)
    adamw(*(t[:0] for t in (weights, grad, first, second)), one, 0.1)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_norm_of_many_equals_float64(device: torch.device, order: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "CHUNK", 256)
    monkeypatch.setattr(norms, "BLOCK", 64)
    shapes = [(1,), (3, 5, 7), (0,), (1001,), (256,), ()]
    tensors = [
        torch.randn(s, device=device).to(d) for s in shapes for d in (torch.float32, torch.bfloat16, torch.float16)
    ]
    tensors += [torch.randn(20, 30, device=device).t(), torch.randn(40, device=device)[::3]]
    exact = torch.linalg.vector_norm(torch.cat([t.double().reshape(-1) for t in tensors]), order)
    found = multi_norm(tensors, order)
    assert found.dtype == torch.float32
    assert abs(float(found) / float(exact) - 1) < 1e-6
    assert abs(float(norms.reference(tensors, order)) / float(exact) - 1) < 1e-6


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:underflow")
@pytest.mark.parametrize("size", [1e30, 2.0**56, 1e18, 1e-14, 1e-22, 1e-30, 1e-35])
def test_a_norm_whose_squares_are_no_fp32_numbers(device: torch.device, size: float) -> None:
    """Alone, and beside numbers of ordinary size; a norm that is itself too large is inf."""
    sized = torch.randn(9000, device=device).mul(size)
    for tensors in ([sized], [sized.bfloat16()], [sized, torch.randn(300, device=device)]):
        exact = torch.linalg.vector_norm(torch.cat([t.double() for t in tensors]))
        assert abs(float(multi_norm(tensors)) / float(exact) - 1) < 1e-6
    assert multi_norm([torch.full((1 << 14,), 3e38, device=device)]) == math.inf


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_tells_of_an_overflow_in_any_place(device: torch.device, bad: float, order: float) -> None:
    for place in (0, 69, 70, 139):
        tensors = [torch.ones(70, device=device), torch.ones(70, device=device, dtype=torch.float16)]
        tensors[place // 70][place % 70] = bad
        found = float(multi_norm(tensors, order))
        assert math.isnan(found) if math.isnan(bad) else found == math.inf


def test_the_norm_of_nothing_and_what_is_refused(device: torch.device) -> None:
    assert multi_norm([]) == 0
    assert multi_norm([torch.ones(0, device=device)]) == 0
    assert multi_norm([None, torch.full((4,), 2.0, device=device)]) == 4, "None: a gradient that there is not"
    with pytest.raises(ValueError, match="order is 1"):
        multi_norm([torch.ones(3, device=device)], 1)
    with pytest.raises(TypeError, match=r"tensor 1 is torch.int64"):
        multi_norm([torch.ones(3, device=device), torch.ones(3, device=device).long()])
