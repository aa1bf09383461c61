"""Every stage with every home on a device that is not the CPU: the same bits as on the CPU; nothing mixes the two."""

from pathlib import Path
from typing import Any
from unittest import mock

import pretend
import pytest
import torch
import worlds
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import refimpl
import refimpl.deepspeed
from refimpl import launch
from refimpl.comm.group import Group
from refimpl.model.experts import Experts, StackedExperts
from refimpl.model.gates import Gate, Routing
from refimpl.model.moe import MoE
from refimpl.offload.homes import Host, is_here
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.gather.unit import unit_of
from refimpl.zero.loop import start
from refimpl.zero.loop.parked import CLASSES
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

together = pytest.mark.xdist_group("pretend")  # so that it is built once


def there() -> None:
    """It is a device: it computes, and does not take the CPU's tensors for its own."""
    x = torch.ones(6, device="pretend").requires_grad_()
    (x * 2).square().sum().backward()
    assert x.grad is not None
    assert x.grad.device.type == "pretend"
    assert torch.equal(x.grad.cpu(), torch.full((6,), 8.0))
    with pytest.raises(RuntimeError, match="tensors of the CPU and of the pretended device"):
        torch.linalg.vecdot(x, torch.ones(6))
    with pytest.raises(RuntimeError, match="tensors of the CPU and of the pretended device"):
        torch.stack([x.sum(), torch.ones(())])
    with pytest.raises(RuntimeError, match="tensors of the CPU and of the pretended device"):
        x.index_select(0, torch.tensor([1]))
    assert x[torch.tensor([1])].device.type == "pretend"
    with pytest.raises(RuntimeError, match="a generator of the CPU"):
        torch.rand(6, generator=torch.Generator(), device="pretend")
    assert torch.rand(6, generator=torch.Generator("pretend"), device="pretend").device.type == "pretend"
    with pytest.raises(RuntimeError, match="NCCL has no way"):
        pretend.away(torch.ones(6))
    with pytest.raises(RuntimeError, match="unpickle it onto theirs"):
        Group.world().all_gather_object({"norm": x.detach().norm()})
    with pytest.raises(RuntimeError, match="a generator of the CPU"):
        torch.randn(6, device="pretend", generator=torch.Generator())
    drawn = torch.randn(6, device="pretend", generator=torch.Generator("pretend").manual_seed(1)).cpu()
    assert torch.equal(drawn, torch.randn(6, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(RuntimeError, match="tensors of the CPU and of the pretended device"):
        torch.stack([x.detach()[0], torch.ones(())])


@together
def test_the_device_is_another(ranks: launch.World) -> None:
    ranks.call(there)


def by_itself() -> None:
    for kind in (DDP, Zero1, Zero2, Zero3):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to("pretend")
        with mock.patch.object(start.levels, "world", return_value=Group(None, device=torch.device("cpu"))):
            stage = kind(model, torch.optim.AdamW(model.parameters()))
        assert stage.group.device.type == "pretend"
        stage.backward(model(torch.randn(4, 8).to("pretend")).square().mean())
        assert stage.step()


@together
def test_a_process_that_is_alone_trains_where_its_model_is(ranks: launch.World) -> None:
    """As `Zero2(model.cuda(), optimizer)` in a script that no launcher started."""
    ranks.call(by_itself)


class Copies(TorchDispatchMode):
    """The types of what goes from the host to the device without a wait, and of what it becomes there."""

    def __init__(self) -> None:
        super().__init__()
        self.down: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_cpu and not args[0].is_cpu and args[2:] == (True,):
            self.down.append((args[1].dtype, args[0].dtype))
        return func(*args, **(kwargs or {}))


def down() -> None:
    model = nn.Linear(64, 64).to("pretend", torch.bfloat16)
    stage = Zero2(model, torch.optim.AdamW(model.parameters()), config=ZeroConfig(optimizer_home=Host()))
    stage.backward(model(torch.ones(2, 64, device="pretend", dtype=torch.bfloat16)).float().square().mean())
    with Copies() as copies:
        assert stage.step()
    assert copies.down
    assert set(copies.down) == {(torch.bfloat16, torch.bfloat16)}


@together
def test_a_weight_of_16_bits_comes_from_the_host_in_16_bits(ranks: launch.World) -> None:
    """torch would send 32, and round there, where it does not wait."""
    ranks.call(down)


def at_the_host() -> None:
    """A buffer that a layer reads there."""
    group = Group.world()
    for kind in (DDP, Zero1, Zero2, Zero3):
        model = nn.Linear(3, 3).to("pretend")
        model.register_buffer("scale", torch.arange(5.0) + group.rank)
        stage = kind(model, torch.optim.AdamW(model.parameters()), group)
        assert torch.equal(model.scale, torch.arange(5.0))
        model.scale += group.rank
        stage.take_weights(group, "again")
        assert torch.equal(model.scale, torch.arange(5.0))
        model.scale += group.rank
        model(torch.ones(1, 3, device="pretend"))
        assert torch.equal(model.scale, torch.arange(5.0)), "before each forward of training, too"


@together
def test_a_buffer_at_the_host_travels_over_the_device(ranks: launch.World) -> None:
    ranks.call(at_the_host)


def dealt_out(folder: Path) -> None:
    listed = Experts([nn.Linear(8, 8) for _ in range(4)])
    model = nn.Sequential(*(MoE(Gate(8, 4, Routing()), experts) for experts in (listed, StackedExperts(8, 6, 4))))
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD"},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = refimpl.initialize(model=model, config=config)[0]
    assert {p.device.type for p in engine.module.parameters()} == {"pretend"}
    engine.save_16bit_model(folder)
    weights = torch.load(folder / "pytorch_model.bin")
    assert all(torch.equal(weights[name], value) for name, value in before.items() if engine.group.rank == 0)


@together
def test_experts_are_dealt_out_of_a_model_that_is_still_at_the_host_and_saved_there(
    ranks: launch.World, tmp_path: Path
) -> None:
    ranks.call(dealt_out, tmp_path)


class Shaped(nn.Module):
    """Its constructor computes with what its children's have made."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(33, 65), nn.Linear(65, 7)
        self.out.weight.data.copy_(torch.ones(7, 1)).mul_(torch.linspace(-1, 1, 65))
        self.register_buffer("scale", torch.tensor([2.0]))
        self.apply(zero_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x).tanh()) * self.scale


def zero_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.bias.data = torch.zeros(module.bias.shape)


def born(remote: str | None, home: dict[str, Any]) -> dict[str, Tensor]:
    """A model whose shards wait `remote`, and then rest where `home` says."""
    torch.manual_seed(0)
    with refimpl.deepspeed.zero.Init(remote_device=remote, config_dict_or_path={"zero_optimization": home}):
        model = Shaped()
    units = [unit for p in model.parameters() if (unit := unit_of(p)) is not None]
    at_host = units[0].device.type == "pretend" and (remote == "cpu" or home != {})
    assert all(is_here(unit.mine) != at_host for unit in units)
    with refimpl.deepspeed.zero.GatheredParameters(model.into.weight, modifier_rank=1):
        model.into.weight.data[0] = 1
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)  # on a GPU `to` keeps parameters without it
    engine = refimpl.initialize(model=model, config=settings(3, False, **home))[0]
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {engine.device.type}
    engine.backward(engine(torch.ones(4, 33, device=engine.device)).square().mean())
    engine.step()
    return {name: engine.stage.full_parameter(name).cpu() for name in engine.stage.names.values()}


@together
@pytest.mark.parametrize(("remote", "home"), [(None, {}), ("cpu", {}), (None, {"offload_param": {"device": "cpu"}})])
def test_a_model_is_born_in_shards(remote: str | None, home: dict[str, Any], ranks: launch.World) -> None:
    here, there = worlds.run(born, remote, home, ranks=2)[0], ranks.call(born, remote, home)[0]
    assert [name for name in here if not torch.equal(here[name], there[name])] == []


def lamb() -> Tensor:
    """The last rank has nothing but padding, and waits for the others' norms all the same."""
    torch.manual_seed(0)
    config = settings(1, False) | {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}
    engine = refimpl.initialize(model=nn.Linear(3, 7), config=config)[0]
    engine.backward(engine(torch.ones(4, 3, device=engine.device)).square().mean())
    engine.step()
    return engine.stage.full_parameter("weight").cpu()


@together
def test_lamb_where_a_rank_has_nothing_but_padding(ranks: launch.World) -> None:
    assert torch.equal(worlds.run(lamb, ranks=2)[0], ranks.call(lamb)[0])


def sliced() -> None:
    """As scripts take a norm by hand: of the slices that the optimizer has at the host, of which there are several."""
    engine = refimpl.initialize(model=nn.Linear(33, 65), config=settings(2, False, offload_optimizer=CPU))[0]
    engine.backward(engine(torch.ones(4, 33, device=engine.device)).square().mean())
    slices = [p for group in engine.optimizer.param_groups for p in group["params"] if p.grad is not None]
    norms = torch.stack([p.grad.norm() for p in slices])
    assert len(norms) > 1
    torch.testing.assert_close(norms.norm(), torch.stack([p.grad.norm() for p in engine.module.parameters()]).norm())


@together
def test_the_norms_of_slices_at_the_host_are_all_on_the_device(ranks: launch.World) -> None:
    ranks.call(sliced)


def leaving() -> None:
    engine = refimpl.initialize(model=nn.Linear(33, 65), config=settings(2, False, offload_optimizer=CPU))[0]
    batch = torch.randn(4, 33).to(engine.device)
    engine.backward(engine(batch).square().mean())
    engine.step()
    blocking: list[bool] = []
    copy = Tensor.copy_

    def copied(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        blocking.extend([not non_blocking] * (to.device.type == "cpu" != source.device.type))
        return copy(to, source, non_blocking)

    loss = engine(batch).square().mean()
    with (
        mock.patch.object(Tensor, "copy_", copied),
        mock.patch.object(torch.accelerator, "synchronize") as waited,
    ):
        engine.backward(loss)
    assert blocking == [False]
    waited.assert_called_once()


@together
def test_backward_goes_on_while_its_gradients_leave(ranks: launch.World) -> None:
    ranks.call(leaving)


def trained(settings: dict[str, Any], folder: Path, default: str | None = None) -> dict[str, Tensor]:
    """Weights and states of five steps, of which two are taken again from a checkpoint, and one weight is replaced.

    Between two steps, and between a backward and its step, everything is at the host for a while. `default`: where
    new tensors lie, if their maker does not say: what is the host's must be there all the same.
    """
    torch.set_default_device(default)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 65), nn.Tanh(), nn.Linear(65, 7))
    model[4].bias.requires_grad_(False)
    engine = refimpl.initialize(model=model, config=settings)[0]
    for step in range(7):
        seed = torch.Generator().manual_seed(10 * (step % 5) + engine.group.rank)
        batch = torch.randn(4, 33, generator=seed, device="cpu").to(engine.device, engine.config.dtype)
        engine.backward(engine(batch).square().mean())
        if step == 5:
            there_and_back(engine)
        engine.step()
        if step == 1:
            there_and_back(engine)
        engine.stage.catch_up()
        if step == 2:
            engine.save_checkpoint(folder, asynchronous=True)
        if step == 4:
            engine.load_checkpoint(folder)
            assert engine.global_steps == 3
            engine.stage.set_full_parameter("2.weight", engine.stage.full_parameter("0.weight")[:, :1].expand(65, 65))
    assert {p.device.type for p in engine.module.parameters()} == {engine.device.type}
    stage, found = engine.stage, {}
    for name in stage.names.values():
        states = {f"{key} of {name}": stage.full_state(name, key) for key in ("exp_avg", "step")}
        found |= {name: stage.full_parameter(name).cpu()} | states
    return {name: value.cpu() for name, value in found.items() if value is not None}


def there_and_back(engine: refimpl.Engine) -> None:
    """What is at the host has no memory on the device, and nothing can be done with it."""
    engine.offload_states()
    engine.offload_states(include=["lp_params"])
    kept = [t for state in CLASSES for t in engine.stage.parked.tensors(state) if t.device.type != "cpu"]
    assert sum(t.untyped_storage().nbytes() for t in kept) == 0
    here = engine.device.type == "cpu" or engine.stage.config.parameter_home is not None
    assert here or len(engine.stage.parked.away["lp_params"]) > 0
    if isinstance(engine.stage, Zero3):
        with pytest.raises(RuntimeError, match="lp_params: at the host"):
            engine.module[0](torch.ones(4, 33, device=engine.device, dtype=engine.config.dtype))
    engine.reload_states()
    engine.reload_states()


def settings(stage: int, bf16: bool, **homes: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 900, **homes}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.1,
        "bf16": {"enabled": bf16},
        "aio": {"block_size": 4096},
        "zero_optimization": zero,
    }


CPU, DISK = {"device": "cpu"}, {"device": "nvme"}
HOMES: dict[str, dict[str, dict[str, Any]]] = {
    "none": {},
    "optimizer at the host": {"offload_optimizer": CPU},
    "half of it": {"offload_optimizer": CPU | {"ratio": 0.5}},
    "one step late": {"offload_optimizer": CPU | {"delayed_update": True}},
    "optimizer on a disk": {"offload_optimizer": DISK},
    "all at the host": {"offload_optimizer": CPU, "offload_param": CPU},
    "parameters on a disk": {"offload_optimizer": CPU, "offload_param": DISK | {"max_in_cpu": 2000}},
    "all on a disk": {"offload_optimizer": DISK, "offload_param": DISK | {"max_in_cpu": 0}},
}


CASES = [(stage, home) for stage in range(4) for home in HOMES if stage == 3 or "offload_param" not in HOMES[home]]


@together
@pytest.mark.parametrize(("stage", "home", "bf16"), [(*case, bool(i % 2)) for i, case in enumerate(CASES)])
def test_the_bits_are_those_of_the_cpu(stage: int, home: str, bf16: bool, ranks: launch.World, tmp_path: Path) -> None:
    homes = {key: section | {"nvme_path": str(tmp_path)} for key, section in HOMES[home].items()}
    asked = settings(stage, bf16, **homes)
    here = worlds.run(trained, asked, tmp_path / "here", ranks=2)[0]
    there = ranks.call(trained, asked, tmp_path / "there", "pretend" if bf16 else None)[0]
    assert here.keys() == there.keys()
    assert [name for name in here if not torch.equal(here[name], there[name])] == []
