"""Optimizers of other people's making: cut only where a trial shows that they may be; with modes and counts."""

from abc import ABC
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn, optim
from training import STAGES
from worlds import run

from refimpl.comm.group import Group
from refimpl.offload.homes import Disk
from refimpl.zero.config import ZeroConfig
from refimpl.zero.optimizer.kind import Kind


class Descent(optim.Optimizer):
    """p -= lr * direction(gradient)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "size": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p.grad, group, p))

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        return grad.sign()


class OfNorms(Descent):
    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        return grad / grad.norm()


class OfMatrices(Descent):
    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        if grad.ndim != 2:
            raise ValueError("a matrix, please")
        return grad


class Estimating(Descent):
    """Weights show nothing of it yet: what it has estimated of all of them will."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        group["size"] += float(grad.square().sum())
        return grad


class EstimatingInTensors(Estimating):
    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        group["size"] = group["size"] + grad.square().sum()
        return grad


class OfSmallerNorms(Descent):
    """As AdaNorm: where the gradient's norm has become smaller than it was in the mean, it is made as large again."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        norm = grad.norm()
        mean = self.state[p]["mean"] = 0.9 * self.state[p].get("mean", norm) + 0.1 * norm
        return grad * max(1.0, float(mean / norm))


class OfAngles(Descent):
    """As AdamP: what goes along the weights is left out, where all rows and their gradients are at right angles."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        cosine = nn.functional.cosine_similarity(grad, p, dim=-1).abs().max()
        return grad.sign() - (grad.sign() * p).sum() * p / p.square().sum() * (p.ndim == 2 and cosine < 0.02)


class Waiting(Descent):
    """As AdaShift: a gradient is used nine steps after it came, and with the norm of those that came since."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        return grad / grad.norm() if self.count > 9 else torch.zeros_like(grad)


class Still(Descent):
    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        return 0 * grad


class OfPairs(Descent):
    """As AggMo, which is element-wise: its state can still not be cut."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        before = self.state[p].get("pair", (grad, grad))
        self.state[p]["pair"] = (grad.clone(), before[0])
        return before[1]


class OfBlocks(Descent):
    """A state for each block of four elements, which is not used yet."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        self.state[p]["largest"] = grad.flatten()[:8].view(2, 4).amax(1)
        return grad


class OfLargerMatrices(Descent):
    """As Adafactors, which factor only matrices of some size."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        return grad / grad.norm() if grad.ndim == 2 and min(grad.shape) >= 128 else grad.sign()


class OfBlocksOfMany(Descent):
    """As torchao's optimizers of 8 bits: rounded in blocks of 256, where there are 4,096 elements, and whole blocks."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        if grad.numel() < 4096 or grad.numel() % 256:
            return grad
        blocks = grad.view(-1, 256)
        unit = blocks.abs().amax(1, keepdim=True) / 127 + 1e-30
        return ((blocks / unit).round() * unit).view(grad.shape)


class Compiled(Descent):
    """As torchao's: what it compiles must still be compiled behind the trial."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        sign: Tensor = torch.compile(torch.sign, backend="eager", fullgraph=True, dynamic=False)(grad)
        return sign


class BesideSmallWeights(Descent):
    """As a LAMB whose ratio of norms is at most 1."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        return grad.sign() * min(1.0, float(p.norm() / grad.sign().norm()))


class OfPlaces(Descent):
    """As GrokAdamW: each parameter in its group goes half as far as the one before it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(group["lr"] * 0.5**i * p.grad)


class Numbering(Descent):
    """As APOLLO, whose constructor gives a seed to every parameter that requires a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        trained = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        for number, p in enumerate(trained, 1):
            self.state[p]["seed"] = number

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        return grad / grad.norm() / self.state[p]["seed"]


class RateFirst(Numbering):
    """As LLaMA-Factory's Muon: its first argument is not the parameters, so that nobody else can make another."""

    def __init__(self, lr: float, its_own: Any) -> None:
        super().__init__(its_own, lr)


def rate_first(params: Any, lr: float = 0.1) -> RateFirst:
    return RateFirst(lr, params)


class Sharing(Descent):
    """As Keller Jordan's Muon: each rank steps some of the parameters, and gets the others from who stepped them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if ranks == 1 or i % ranks == distributed.get_rank():
                    p.sub_(group["lr"] * p.grad.sign())
                if ranks > 1:
                    distributed.broadcast(p, i % ranks)


class LateByItself(Descent):
    """As RAdam, which without a variance that it trusts goes nowhere for five steps."""

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        count = self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return grad * (count > 5)


class WithATensorsRate(Descent):
    """As torchao's, whose rate must stay a tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(lr))

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        if not isinstance(group["lr"], Tensor):
            raise RuntimeError("lr was changed to a non-Tensor object")
        return grad.sign()


class Abstract(ABC, optim.Optimizer):
    """Its objects have another memory layout than those of an optimizer without an ABC before it."""


class Derived(Abstract, Descent):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.loaded = True


class Counting(Descent):
    """Element-wise, with a count in the group, and other weights in evaluation: as schedule-free ones have it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group |= {"k": 0, "train_mode": False}

    def step(self, closure: Any = None) -> None:
        assert all(group["train_mode"] for group in self.param_groups)
        for group in self.param_groups:
            group["k"] += 1
        super().step()

    def direction(self, grad: Tensor, group: dict[str, Any], p: Tensor) -> Tensor:
        return grad / group["k"]

    def train(self) -> None:
        self.turn(True, 2.0)

    def eval(self) -> None:
        self.turn(False, 0.5)

    @torch.no_grad()
    def turn(self, mode: bool, factor: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != mode and group["k"] else ():
                p.mul_(factor)
            group["train_mode"] = mode


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 9))  # more than one rank's 64 elements


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        (Descent, ""),
        (Counting, ""),
        (OfNorms, "it computes other weights"),
        (OfMatrices, "tried on a part of a parameter it raises ValueError: a matrix, please"),
        (Derived, ""),
        (Estimating, "on a part of a parameter its size is another"),
        (EstimatingInTensors, "on a part of a parameter its size is another"),
        (OfSmallerNorms, "it computes other weights"),
        (OfAngles, "it computes other weights"),
        (Waiting, "it computes other weights"),
        (Still, "by itself it changes nothing in 64 steps"),
        (OfPairs, "it keeps a tuple as the state 'pair', which cannot be cut"),
        (
            OfBlocks,
            r"it keeps a state 'largest' of shape \(2,\) for a parameter of shape \(4, 6\), which cannot be cut",
        ),
        (OfLargerMatrices, "it computes other weights"),
        (OfBlocksOfMany, "it computes other weights"),
        (BesideSmallWeights, "it computes other weights"),
        (Compiled, ""),
        (OfPlaces, "it computes other weights"),
        (LateByItself, ""),
        (WithATensorsRate, ""),
        (optim.Adafactor, "it computes other weights"),
        (optim.LBFGS, "tried by itself it raises TypeError: .*closure"),
    ],
)
def test_what_is_allowed_is_tried(kind: Callable[..., Any], fails: str) -> None:
    """Also where a schedule begins with no rate; neither random numbers nor the optimizer itself are changed."""
    optimizer, state = (
        kind([nn.Parameter(torch.ones(2, 3))], lr=0.0 if kind is not Estimating else 0.1),
        torch.get_rng_state(),
    )
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    found = Kind(optimizer, allow_untested=True)
    assert found.elementwise == (not fails)
    with pytest.raises(TypeError, match=fails) if fails else nullcontext():
        found.refuse_shard()
    assert settings == {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert torch.get_rng_state().equal(state)


def test_one_of_sparse_gradients_alone_is_refused() -> None:
    """Torch's own word at its first step, "does not support dense gradients", is a riddle to whose layer is sparse."""
    with pytest.raises(TypeError, match=r"SparseAdam takes sparse gradients alone, .* dense: use Adam"):
        Kind(optim.SparseAdam([nn.Parameter(torch.ones(2, 3))]))


def test_each_of_the_options_that_groups_have_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def what_fails(make: Callable[[list[nn.Parameter]], Any], device: torch.device) -> str:
        tried.append(make([nn.Parameter(torch.ones(1))]).param_groups[0]["size"])
        return ""

    monkeypatch.setattr("refimpl.zero.optimizer.kind.what_fails", what_fails)
    sizes = (0.0, 1.0, 0.0, 1.0, 0.0)
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 * i, "size": size} for i, size in enumerate(sizes)]
    assert Kind(Descent(groups), allow_untested=True).elementwise
    assert tried == [0.0, 1.0]


def allowed(stage_name: str, kind: Callable[..., Any]) -> list[Tensor]:
    model, group = small(), Group.world()
    optimizer = kind(model.parameters(), lr=0.1)
    STAGES[stage_name](model, optimizer, group, ZeroConfig(allow_untested_optimizer=True))
    for step in range(3):
        model(batch(step, group.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [w.clone() for w in model.state_dict().values()]


def alone(kind: Callable[..., Any], ranks: int) -> list[Tensor]:
    model = small()
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(ranks):
            (model(batch(step, rank)).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [w.detach() for w in model.state_dict().values()]


@pytest.mark.parametrize("kind", [OfNorms, OfPlaces, Numbering, rate_first, Sharing, optim.Adafactor])
def test_what_needs_whole_parameters_has_them_at_stage_0_and_is_refused_behind_it(kind: Callable[..., Any]) -> None:
    """accelerate and transformers allow every optimizer: that alone must not have it cut."""
    expected = alone(kind, 2)
    for weights in run(allowed, "ddp", kind, ranks=2):
        for found, right in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    name = {"rate_first": "RateFirst"}.get(kind.__name__, kind.__name__)
    for stage in ("zero1", "zero2", "zero3"):
        with pytest.raises(Exception, match=rf"{name} is allowed \(zero_allow_untested_optimizer\), but did not pass"):
            run(allowed, stage, kind, ranks=2)


def behind_an_abc(stage_name: str) -> list[Tensor]:
    model, group = small(), Group.world()
    optimizer = Derived(model.parameters(), lr=0.1)
    stage = STAGES[stage_name](model, optimizer, group, ZeroConfig(allow_untested_optimizer=True))
    for step in range(3):
        model(batch(step, group.rank)).square().mean().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())  # the stage's, and the class's own behind it
        optimizer.zero_grad()
    assert optimizer.loaded
    assert type(optimizer).__name__ == "Derived"
    assert isinstance(optimizer, Derived)
    weights = [w.clone() for w in stage.model.state_dict().values()]
    stage.release()
    assert type(optimizer) is Derived
    return weights


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_has_an_abc_before_it_is_taken_over_and_let_go(stage: str) -> None:
    """As all of pytorch_optimizer's have."""
    for weights in run(behind_an_abc, stage, ranks=2):
        for found, right in zip(weights, alone(Derived, 2), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def in_modes(stage_name: str, dtype: torch.dtype | None, folder: Path | None, share: float) -> list[Tensor]:
    """The weights in evaluation after each of three steps; `share` of the optimizer's state rests in `folder`."""
    model, group, seen = small(), Group.world(), []
    optimizer = Counting(model.parameters())
    home = {} if folder is None else {"optimizer_home": Disk(folder), "sub_group_size": 20, "offload_ratio": share}
    config = ZeroConfig(dtype=dtype, allow_untested_optimizer=True, reduce_bucket_size=40, **home)
    STAGES[stage_name](model, optimizer, group, config)
    for step in range(3):
        optimizer.train()
        model(batch(step, group.rank).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.train()  # as transformers' Trainer does before each batch
        optimizer.eval()
        seen += [w.float().clone() for w in model.state_dict().values()]
    return seen


def rewritten() -> list[int]:
    """How often the weights were, after each of some calls."""
    model, calls, counts = small(), list[str](), []
    optimizer = Counting(model.parameters())
    stage = STAGES["zero1"](model, optimizer, Group.world(), ZeroConfig(allow_untested_optimizer=True))
    rewrite = stage.rewrite
    stage.rewrite = lambda write: (calls.append(""), rewrite(write))[1]  # type: ignore[method-assign, func-returns-value]
    for switch in (optimizer.train, optimizer.train, optimizer.eval, optimizer.eval, optimizer.train):
        switch()
        counts.append(len(calls))
    return counts


def test_who_asks_for_the_mode_that_is_rewrites_nothing() -> None:
    """transformers' Trainer asks before each batch; with the state on a disk a rewrite reads and writes all of it."""
    assert run(rewritten, ranks=2) == [[1, 1, 2, 2, 3]] * 2


def modes_alone(ranks: int) -> list[Tensor]:
    model, seen = small(), []
    optimizer = Counting(model.parameters())
    for step in range(3):
        optimizer.train()
        for rank in range(ranks):
            (model(batch(step, rank)).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        seen += [w.detach().clone() for w in model.state_dict().values()]
    return seen


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["fp32", "bf16", "disk", "half of it on a disk"])
def test_modes_of_an_optimizer_reach_the_weights_of_all_ranks(stage: str, where: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if where == "bf16" else None
    near = {"rtol": 2e-2, "atol": 4e-3} if dtype else {"rtol": 1e-5, "atol": 1e-6}
    share = 0.5 if "half" in where else 1.0
    for found in run(in_modes, stage, dtype, tmp_path if "disk" in where else None, share, ranks=2):
        for weights, right in zip(found, modes_alone(2), strict=True):
            torch.testing.assert_close(weights, right, **near)
