"""What cards claim and no other test shows: arithmetic of a single process."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import refimpl.activation.checkpoint
from refimpl.model.gpt import GPTConfig
from refimpl.parallel.pipeline import clock
from refimpl.parallel.pipeline.schedules.named import schedule
from refimpl.plan.time import bubble
from refimpl.plan.transformer import flops_per_token


@pytest.mark.parametrize("width", [64, 256])
def test_scores_cost_as_much_as_matrices_at_six_widths(width: int) -> None:
    def flops(context: int, layers: int) -> float:
        return flops_per_token(GPTConfig(vocab=64, context=context, width=width, layers=layers, heads=4))

    def block(context: int) -> float:
        return flops(context, 2) - flops(context, 1)

    matrices = block(1) - (block(2) - block(1))  # the cost is linear in the context: what is left at none
    assert block(6 * width) == pytest.approx(2 * matrices, rel=0.01)


def lamb(weight: Tensor, gradient: Tensor) -> Tensor:
    """One step of LAMB without decay, from zero moments: Adam's update times the ratio of two norms."""
    update = gradient.sign()
    return weight - 0.1 * weight.norm() / update.norm() * update


def test_lamb_on_slices_is_not_lamb() -> None:
    weight, gradient = torch.tensor([1.0, 1.0, 8.0, 8.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    by_slice = torch.cat([lamb(w, g) for w, g in zip(weight.chunk(2), gradient.chunk(2), strict=True)])
    assert not torch.allclose(by_slice, lamb(weight, gradient), rtol=0.05)
    for cls in (torch.optim.AdamW, torch.optim.SGD):
        whole, parts = nn.Parameter(weight.clone()), [nn.Parameter(w.clone()) for w in weight.chunk(2)]
        whole.grad = gradient
        for part, g in zip(parts, gradient.chunk(2), strict=True):
            part.grad = g
        cls([whole], lr=0.1).step()
        cls(parts, lr=0.1).step()
        assert torch.equal(torch.cat([p.detach() for p in parts]), whole)


def orthogonal(matrix: Tensor) -> Tensor:
    """What Muon's Newton-Schulz iteration tends to: all singular values one."""
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def test_muon_on_row_shards_is_not_muon() -> None:
    """Rows cut off by dim-0 sharding are made orthogonal among themselves alone."""
    torch.manual_seed(0)
    common = torch.randn(1, 8)
    momentum = common + 0.1 * torch.randn(4, 8)  # all rows point nearly the same way
    whole = orthogonal(momentum)
    by_shard = torch.cat([orthogonal(rows) for rows in momentum.chunk(2)])
    assert torch.allclose(whole @ whole.T, torch.eye(4), atol=1e-5)
    overlap = by_shard @ by_shard.T
    assert overlap[:2, 2:].abs().max() > 0.5, "rows of two shards repeat the same direction"
    assert by_shard.sum(0).norm() > 1.2 * whole.sum(0).norm(), "so the update is too long where the shards agree"


def test_with_error_feedback_what_was_sent_is_what_was_meant() -> None:
    torch.manual_seed(0)
    meant, sent, error = torch.zeros(100), torch.zeros(100), torch.zeros(100)
    for _ in range(200):
        gradient = torch.randn(100) + 0.1
        value = gradient + error
        compressed = value.sign() * value.abs().mean()
        error = value - compressed
        meant, sent = meant + gradient, sent + compressed
        assert torch.allclose(sent + error, meant, atol=1e-3)
    assert (sent - meant).norm() < 0.3 * meant.norm()
    without = torch.stack([(torch.randn(100) + 0.1).sign() for _ in range(200)]).sum(0)
    assert not torch.allclose(without, meant, rtol=0.1), "signs alone lose the sizes"


def test_ways_to_keep_a_weight_in_16_bits() -> None:
    torch.manual_seed(0)
    steps, update = 200, 1e-3
    # Split: bf16 is the upper half of fp32, and the lower 16 bits kept beside it give it back exactly.
    exact = torch.linspace(-3, 3, 1001)
    bits = exact.view(torch.int32)
    low = bits & 0xFFFF
    upper = ((bits >> 16) << 16).view(torch.float32).bfloat16()
    assert torch.equal(((upper.view(torch.int16).int() << 16) | low).view(torch.float32), exact)
    # Stochastic: up with probability equal to the fraction. Right on average, where round-to-nearest never moves.
    nearest = torch.ones(10_000, dtype=torch.bfloat16)
    chance = nearest.clone()
    for _ in range(steps):
        nearest = (nearest.float() + update).bfloat16()
        noise = torch.randint(0, 1 << 16, chance.shape, dtype=torch.int32)
        raised = (chance.float() + update).view(torch.int32) + noise
        chance = ((raised >> 16) << 16).view(torch.float32).bfloat16()
    assert nearest.float().mean() == 1
    assert chance.float().mean() == pytest.approx(1 + steps * update, abs=0.01)


@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (4, 8), (4, 16)])
def test_1f1b_has_gpipes_bubble_and_fewer_activations(stages: int, micro: int) -> None:
    gpipe, one_f_one_b = (schedule(name, stages, micro) for name in ("gpipe", "1f1b"))
    assert clock.share(gpipe) == clock.share(one_f_one_b) == pytest.approx(bubble(stages, micro))
    assert clock.alive(gpipe) == [micro] * stages
    assert clock.alive(one_f_one_b) == [stages - s for s in range(stages)]


@pytest.mark.parametrize("ranks", [8, 512])
def test_the_slowest_of_many_is_below_the_bound(ranks: int) -> None:
    torch.manual_seed(0)
    slowest = torch.randn(2000, ranks).max(1).values.mean().item()
    bound = math.sqrt(2 * math.log(ranks))
    assert 0.65 * bound < slowest < bound


def test_a_common_mask_does_not_average_out() -> None:
    torch.manual_seed(0)
    ranks, kept = 16, 0.5

    def noise(common: bool) -> float:
        masks = (torch.rand(4000, 1 if common else ranks) < kept) / kept
        return masks.mean(1).var().item()

    assert noise(common=False) == pytest.approx(noise(common=True) / ranks, rel=0.2)


def test_autocast_keeps_fp32_weights_and_sums() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = model[0](x)
        loss = nn.functional.mse_loss(product, torch.zeros_like(product))
    assert (product.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    loss.backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.dtype == torch.float32
    assert {p.dtype for p in model.bfloat16().parameters()} == {torch.bfloat16}
    assert model(x.bfloat16()).dtype == torch.bfloat16


def test_adam_in_16_bits() -> None:
    """The second moment stops in bf16; in fp16 epsilon is zero, and a zero gradient gives NaN."""
    moment = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        moment = (0.999 * moment.float() + 0.001 * 4.0).bfloat16()
    assert moment.item() == 1, "four times the variance for a thousand steps, and it has not moved"
    exact = 4 - 3 * 0.999**1000
    assert exact > 2.8
    assert torch.tensor(1e-8).half() == 0
    assert torch.tensor(1e-8).bfloat16() > 0
    assert (torch.zeros(1).half() / (torch.zeros(1).half() + torch.tensor(1e-8).half())).isnan().all()
    root = torch.tensor(1e-4).bfloat16()
    assert root + torch.tensor(1e-8).bfloat16() == root, "beside a root of 1e-4 it rounds away, as it may"


def test_one_outlier_takes_a_tensors_fp8_range() -> None:
    largest, smallest = torch.finfo(torch.float8_e4m3fn).max, 2.0**-9
    assert torch.tensor(smallest).to(torch.float8_e4m3fn).float() == smallest
    assert torch.tensor(smallest * 0.49).to(torch.float8_e4m3fn).float() == 0

    def cast(x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    x = torch.full((4, 128), 1e-4)
    x[0, 0] = 448.0
    per_tensor = cast(x, x.abs().max() / largest)
    per_block = cast(x, x.abs().amax(1, keepdim=True) / largest)
    assert (per_tensor[1:] == 0).all(), "an outlier elsewhere flushes all small values"
    assert torch.allclose(per_block[1:], x[1:], rtol=0.1), "with a scale for each block only its neighbours suffer"


def test_an_outlier_spoils_int8_and_not_fp8() -> None:
    def error(largest: float, smaller: float, dtype: torch.dtype) -> float:
        """Of the worst of 1000 numbers from `smaller` to twice of it, relative, beside one of `largest`."""
        x = torch.linspace(smaller, 2 * smaller, 1000)
        x[0] = largest
        top = 127 if dtype == torch.int8 else torch.finfo(dtype).max
        units = x / (largest / top)
        units = units.round() if dtype == torch.int8 else units
        back = units.to(dtype).float() * (largest / top)
        return float(((back - x).abs() / x)[1:].max())

    fp8 = torch.float8_e4m3fn
    assert error(1000, 1, torch.int8) == 1, "all that is ordinary becomes zero"
    assert error(1000, 1, fp8) <= 1 / 16
    assert error(448, 2**-6, fp8) <= 1 / 16 < error(448, 2**-8, fp8), "down to 448 * 2**6 below the largest"
    assert error(448, 0.49 * 2**-10, fp8) == 1 > error(448, 1.01 * 2**-10, fp8), "and all zero 448 * 2**10 below it"
    beside = [(torch.tensor(v).to(fp8).float() - v).abs() / 448 for v in (431.9, 432.1)]
    assert beside == pytest.approx([1 / 28, 1 / 28], rel=0.01)


@pytest.mark.parametrize("width", [4096, 8192])
def test_a_product_is_compute_bound_from_that_batch_on(width: int) -> None:
    peak, bandwidth = 989e12, 3.35e12
    rows = peak / bandwidth * width / (width - 2 * peak / bandwidth)

    def seconds(rows: float) -> tuple[float, float]:
        return 2 * rows * width * width / peak, 2 * (2 * rows * width + width * width) / bandwidth

    compute, memory = seconds(rows)
    assert compute == pytest.approx(memory)
    assert seconds(rows / 2)[0] < seconds(rows / 2)[1]
    assert seconds(rows * 2)[0] > seconds(rows * 2)[1]


def test_the_ema_of_shards_is_the_shard_of_the_ema() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(10) for _ in range(5)]
    whole, shards = weights[0].clone(), [w.clone() for w in weights[0].chunk(3)]
    for w in weights[1:]:
        whole.lerp_(w, 0.1)
        for mine, part in zip(shards, w.chunk(3), strict=True):
            mine.lerp_(part, 0.1)
    assert torch.equal(torch.cat(shards), whole)
    low = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        low.lerp_(torch.full_like(low, 2.0), 1e-3)
    assert low.item() == 1, "in bf16 it never moves"


def test_only_behind_accumulation_is_a_gradient_complete() -> None:
    """Two uses and an earlier micro-batch: what a tensor's, a parameter's and a module's hook find."""
    layer = nn.Linear(1, 1, bias=False)
    weight, x, seen = layer.weight, torch.ones(1, requires_grad=True), dict[str, list[float | None]]()

    def note(hook: str, gradient: Tensor | None) -> None:
        seen.setdefault(hook, []).append(None if gradient is None else gradient.item())

    def early(gradient: Tensor) -> None:
        note("handed to the tensor's", gradient)
        note("in .grad", weight.grad)
        weight.grad = None  # in vain

    layer(3 * x).backward()  # an earlier micro-batch: 3
    weight.register_hook(early)
    weight.register_post_accumulate_grad_hook(lambda p: note("post-accumulate", p.grad))
    layer.register_full_backward_hook(lambda *_: note("module's", weight.grad))
    layer(2 * layer(x)).backward()  # two uses
    uses = 2 * 2 * weight.item()
    assert seen["handed to the tensor's"] == pytest.approx([uses])
    assert seen["in .grad"] == [3.0]
    assert seen["post-accumulate"] == pytest.approx([uses])  # the tensor's hook has dropped the 3, and no more
    assert seen["module's"][0] != pytest.approx(uses)


@pytest.mark.parametrize(
    "checkpoint",
    [partial(torch.utils.checkpoint.checkpoint, use_reentrant=False), refimpl.activation.checkpoint.checkpoint],
    ids=["torch's", "refimpl's"],
)
def test_the_tail_of_a_checkpointed_mlp_is_not_computed_again(checkpoint: Callable[..., Tensor]) -> None:
    """The second product of the first run is not in the second: its input is all that backward wants."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports triton: tests/kernels/conftest.py must first

    up, down = nn.Linear(8, 32), nn.Linear(32, 8)

    def mlp(x: Tensor) -> Tensor:
        return x + down(nn.functional.gelu(up(x)))

    def backward_flops(call: Callable[..., Tensor]) -> Any:
        loss = call(mlp, torch.randn(5, 8, requires_grad=True)).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_total_flops()

    product = 2 * 5 * 8 * 32
    assert backward_flops(lambda fn, x: fn(x)) == 4 * product
    assert backward_flops(checkpoint) == 5 * product
