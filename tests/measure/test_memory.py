"""The memory meter against sizes computed by hand, and against the process's own memory."""

import gc
import mmap
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import run

from refimpl.measure.memory import MemoryMeter

KB = 256  # floats


def owner(**classes: Tensor | list[Tensor]) -> MemoryMeter:
    return MemoryMeter(lambda: {name: t if isinstance(t, list) else [t] for name, t in classes.items()})


def test_a_storage_counts_once_and_whole_however_many_views_name_it() -> None:
    flat = torch.zeros(4 * KB)
    meter = owner(parameters=[flat[:10], flat[10:20], flat])
    assert meter.now() == {"parameters": 4096, "activations": 0, "other": 0}


def test_a_storage_belongs_to_the_first_class_that_claims_it() -> None:
    flat, moments = torch.zeros(KB), torch.zeros(2 * KB)
    meter = owner(parameters=flat, optimizer=[moments, flat[3:]], buckets=moments)
    assert meter.now() == {"parameters": 1024, "optimizer": 2048, "buckets": 0, "activations": 0, "other": 0}


def test_a_storage_resized_to_zero_counts_zero() -> None:
    gathered = torch.zeros(KB)
    meter = owner(gathered=gathered)
    assert meter.now()["gathered"] == 1024
    gathered.untyped_storage().resize_(0)
    assert meter.now()["gathered"] == 0


def test_classes_are_asked_anew_at_every_count() -> None:
    owned: list[Tensor] = []
    meter = owner(buckets=owned)
    assert meter.now()["buckets"] == 0
    owned.append(torch.zeros(KB, dtype=torch.bfloat16))
    assert meter.now()["buckets"] == 512


def test_sample_raises_each_peak_and_keeps_the_moment_of_the_highest_total() -> None:
    a, b = [torch.zeros(KB)], [torch.zeros(KB)]
    meter = owner(a=a, b=b)
    meter.sample()
    a.append(torch.zeros(2 * KB))  # a 3, b 1
    meter.sample()
    a.clear()
    b.append(torch.zeros(KB))  # a 0, b 2
    meter.sample()
    assert meter.peak == {"a": 3072, "b": 2048, "activations": 0, "other": 0}
    assert meter.at_peak == {"a": 3072, "b": 1024, "activations": 0, "other": 0}
    meter.reset_peak()
    meter.sample()
    assert meter.peak == meter.at_peak == {"a": 0, "b": 2048, "activations": 0, "other": 0}


@pytest.fixture
def mlp() -> nn.Sequential:
    """Linear 8 -> 16, tanh, Linear 16 -> 4."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def training_meter(model: nn.Module) -> MemoryMeter:
    return MemoryMeter(
        lambda: {
            "parameters": list(model.parameters()),
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        }
    )


def test_activations_are_what_forward_keeps_for_backward(mlp: nn.Sequential) -> None:
    x = torch.randn(32, 8)
    meter = training_meter(mlp)
    weights = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    with meter:
        loss = mlp(x).sum()
        # The first Linear's output died when tanh had run: backward needs tanh's output (32x16) only.
        # The last Linear's output died after the sum. The scalar loss is alive.
        assert meter.now() == {"parameters": weights, "gradients": 0, "activations": 4 * (32 * 16 + 1), "other": 0}
        loss.backward()
        assert meter.now() == {"parameters": weights, "gradients": weights, "activations": 4, "other": 0}
        del loss
        assert meter.now()["activations"] == 0
    # Highest in forward: the first Linear's output beside tanh's (2 x 32x16).
    assert meter.peak["activations"] == 4 * 2 * 32 * 16
    # In backward, beside the gradients: those of the activations, at least tanh's (32x16).
    assert meter.peak["other"] >= 4 * 32 * 16
    assert meter.peak["gradients"] == weights


def test_checkpointing_lowers_the_activations_and_recomputed_ones_count(mlp: nn.Sequential) -> None:
    x = torch.randn(32, 8, requires_grad=True)

    def activations(reentrant: bool | None) -> tuple[int, int]:
        """After forward, and at the peak of backward alone."""
        mlp.zero_grad()
        meter = training_meter(mlp)
        with meter:
            y = mlp(x) if reentrant is None else checkpoint(mlp, x, use_reentrant=reentrant)
            loss = y.sum()
            del y
            kept = meter.now()["activations"]
            meter.reset_peak()
            loss.backward()
        return kept, meter.peak["activations"]

    tanh, scalar = 4 * 32 * 16, 4
    assert activations(None)[0] == tanh + scalar
    for reentrant in (False, True):
        kept, in_backward = activations(reentrant)
        assert kept == scalar
        assert in_backward >= tanh


def test_a_meter_that_is_entered_twice_watches_on_and_leaves_no_hook(mlp: nn.Sequential) -> None:
    meter, x = training_meter(mlp), torch.randn(32, 8)
    with meter, torch.no_grad():
        with meter:
            mlp(x)
        y = mlp(x)  # made in a forward, although without gradients
        assert meter.now()["activations"] == y.nbytes
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


class Doubled(torch.autograd.Function):
    """Keeps a tensor that only its forward, which runs without gradients, has made."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.kept = x * 3  # type: ignore[attr-defined]
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        return grad * 2


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


def test_what_an_autograd_function_keeps_in_a_module_is_activations() -> None:
    x = torch.zeros(KB, requires_grad=True)
    meter = owner(parameters=x)
    with meter:
        y = Double()(x)
        assert meter.now() == {"parameters": 1024, "activations": 2048, "other": 0}
        del y
        assert meter.now()["activations"] == 0


def test_optimizer_states_are_other_until_their_class_claims_them(mlp: nn.Sequential) -> None:
    optimizer = torch.optim.AdamW(mlp.parameters(), fused=True)
    weights = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    claimed: list[Tensor] = []
    meter = MemoryMeter(
        lambda: {
            "parameters": mlp.parameters(),
            "gradients": [p.grad for p in mlp.parameters() if p.grad is not None],
            "optimizer": claimed,
        }
    )
    with meter:
        mlp(torch.randn(2, 8)).sum().backward()
        assert not optimizer.state  # torch makes it in the first step
        optimizer.step()
        assert meter.now()["other"] >= 2 * weights
        claimed += [t for state in optimizer.state.values() for t in state.values()]
        steps = 4 * 4  # one fp32 step counter for each of four parameters
        assert meter.now()["optimizer"] == 2 * weights + steps
        assert meter.now()["other"] == meter.now()["activations"] == 0


def test_a_view_leaves_its_storage_in_the_class_where_it_was_made() -> None:
    meter = MemoryMeter(dict)
    with meter:
        with torch.no_grad():
            buffer = torch.zeros(KB)
        view = buffer.view(2, -1)
        assert meter.now() == {"activations": 0, "other": 1024}
        made = torch.zeros(KB)
        with torch.no_grad():
            made[1:].add_(1)
        assert meter.now() == {"activations": 1024, "other": 1024}
    del view


def test_the_meter_keeps_nothing_alive() -> None:
    meter = MemoryMeter(dict)
    with meter:
        kept = torch.ones(KB)
        watched = weakref.ref(kept.untyped_storage())
        assert sum(meter.now().values()) == 1024
        del kept
        assert watched() is None
    assert sum(meter.now().values()) == 0


def test_the_watch_ends_with_the_block_even_when_a_forward_raises() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    meter = MemoryMeter(dict)
    x = torch.ones(1)
    with pytest.raises(ZeroDivisionError), meter:
        Fails()(x)
    outside = nn.Identity()(torch.ones(KB))
    assert sum(meter.now().values()) == 0
    with meter, torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            Fails()(x)
        made = torch.ones(KB)
        assert meter.now() == {"activations": 0, "other": 1024}
    del outside, made


def test_table_shows_the_same_numbers() -> None:
    buffer = [torch.zeros(2 * KB)]
    meter = owner(parameters=torch.zeros(KB), buckets=buffer)
    meter.sample()
    buffer.clear()
    table = meter.table()
    assert table.index.name == "class"
    assert table["now"].to_dict() == meter.now()
    assert table["peak"].to_dict() == meter.peak
    assert table["at_peak"].to_dict() == meter.at_peak
    fresh = owner(parameters=torch.zeros(KB)).table()
    assert fresh.loc["parameters"].to_dict() == {"now": 1024, "peak": 0, "at_peak": 0}


def grows(file: Path) -> None:
    owned: list[Tensor] = []
    meter = owner(buckets=owned)
    with file.open("w+b") as code:
        code.write(bytes(32 * 2**20))
        os.fsync(code.fileno())  # a page that is still to be written is not taken
        mapped = mmap.mmap(code.fileno(), 0, prot=mmap.PROT_READ)
    assert not any(mapped[:: mmap.PAGESIZE])
    gc.collect()
    before = meter.cross_check()
    owned += [torch.ones(16 * 2**20) for _ in range(2)]  # 2 x 64 MiB, every page touched
    if sys.platform == "linux":
        Path("/proc/self/comm").write_text("ray::worker")  # a name with colons
        mapped.madvise(21)  # MADV_PAGEOUT: the system takes them, as it may a library's when memory is short
    after = meter.cross_check()
    grown = after["counted"] - before["counted"]
    assert grown == 128 * 2**20
    assert after["resident"] - before["resident"] == pytest.approx(grown, rel=0.05)
    assert ("cuda_allocated" in after) == (torch.cuda.is_available() and torch.cuda.is_initialized())


def test_counted_bytes_grow_as_the_process_does(tmp_path: Path) -> None:
    run(grows, tmp_path / "code", ranks=1)  # not here, where memory that other tests have freed may be taken again


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_counted_bytes_are_those_of_the_cuda_allocator() -> None:
    torch.cuda.empty_cache()  # a block that others have left, and that is up to 1 MB longer, would be given whole
    owned = [torch.ones(KB, device="cuda")]
    meter = owner(buckets=owned)
    before = meter.cross_check()
    owned.append(torch.ones(2**20, device="cuda"))
    after = meter.cross_check()
    assert after["cuda_allocated"] - before["cuda_allocated"] == after["counted"] - before["counted"] == 4 * 2**20
