"""ZeRO-3's parameters under DeepSpeed's names: what they answer, Init's arguments, GatheredParameters, leaf modules."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import worlds
from torch import nn

import refimpl.deepspeed as deepspeed
from refimpl.comm.group import Group
from refimpl.deepspeed.runtime.zero import partition_parameters
from refimpl.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from refimpl.deepspeed.utils import set_z3_leaf_modules
from refimpl.launch import RankError

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 6},
}


def of_all_ranks(number: int) -> list[int]:
    return Group.world().all_gather_object(number)


def answers() -> None:
    with deepspeed.zero.Init():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    whole = nn.Linear(2, 2).weight
    assert not hasattr(whole, "ds_id")
    weight = model[0].weight
    state = model.state_dict()  # a collective; whole on every rank
    assert (state["0.weight"].shape, type(state["0.weight"])) == ((8, 8), torch.Tensor)
    assert all(tensor.isfinite().all() for tensor in state.values())
    model.load_state_dict({name: tensor + 1 for name, tensor in state.items()})
    assert model.state_dict()["1.bias"].equal(state["1.bias"] + 1)
    for engine in (None, deepspeed.initialize(model=model, config=CONFIG)[0]):
        assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
        assert (weight.ds_shape, weight.ds_numel, weight.ds_persist) == ((8, 8), 64, False)
        assert weight.ds_id != model[1].weight.ds_id
        assert weight.ds_tensor.dim() == 1
        assert sum(of_all_ranks(weight.partition_numel())) == 64  # its own elements, without its bias's or padding
        weight.all_gather()
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
        kept = weight.detach()
        assert kept.isfinite().all()
        weight.partition()
        assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
        assert kept.isfinite().all(), "whoever has kept a view of it keeps the values"
        weight.all_gather(param_list=[weight, model[1].weight])
        assert model[1].weight.ds_status == ZeroParamStatus.AVAILABLE
        with torch.no_grad():
            model[1].weight.fill_(7)
        model[1].weight.partition(param_list=[model[1].weight], has_been_updated=True)
        weight.partition()
        with deepspeed.zero.GatheredParameters(model[1].weight):
            assert model[1].weight.eq(7).all()
        if engine is not None:
            small = model[1].bias  # four elements: stays whole
            assert (small.ds_persist, small.ds_status, small.ds_numel) == (True, ZeroParamStatus.AVAILABLE, 4)
            small.partition()
            small.all_gather()
            assert small.detach().isfinite().all()
            for p in model.parameters():
                assert p.ds_tensor.shape == deepspeed.utils.safe_get_local_fp32_param(p).shape
            assert sum(of_all_ranks(small.ds_tensor.numel())) == 4
            assert deepspeed.utils.safe_get_full_fp32_param(model[1].weight).eq(7).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sharded_parameter_answers(ranks: int) -> None:
    worlds.run(answers, ranks=ranks)


def shard_written(how: str, section: dict[str, Any]) -> None:
    """Each rank writes its part, as DeepSpeed's own tests do; it is gathered, and the next step starts from it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 6, **section.pop("zero_optimization", {})}
    sgd = {"type": "SGD", "params": {"lr": 0.0}}
    config = {**CONFIG, "optimizer": sgd, "zero_optimization": zero, **section}
    engine = deepspeed.initialize(model=model, config=config)[0]
    p, rank = model[0].weight, engine.group.rank

    def step() -> None:
        engine.backward(engine(torch.ones(2, 8, dtype=p.dtype)).float().square().mean())
        engine.step()

    step()
    mine = torch.full_like(p.ds_tensor, rank + 1)
    assert type(mine) is torch.Tensor
    if how == "data":
        p.ds_tensor.data = mine
    elif how == "itself":
        p.ds_tensor = mine
    elif how == "index":
        p.ds_tensor[:] = mine
    elif how == "view":
        for half in p.ds_tensor.detach().tensor_split(2):
            half.fill_(rank + 1)
    elif how == "out":
        torch.add(mine, 0, out=p.ds_tensor)
    else:
        p.ds_tensor.data.copy_(mine)
    assert p.ds_tensor.equal(mine)
    parts = engine.group.all_gather_object(copy.deepcopy(p.ds_tensor))
    for _ in range(2):
        with deepspeed.zero.GatheredParameters(p):
            assert p.detach().flatten().equal(torch.cat(parts))
        assert deepspeed.utils.safe_get_full_fp32_param(p).flatten().equal(torch.cat(parts).float())
        step()
    with pytest.raises(RuntimeError, match=r"ds_tensor of parameter 0\.weight: it is .* cannot become"):
        p.ds_tensor.data = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"ds_tensor of parameter 0\.weight: it is .* cannot become torch\.float64"):
        p.ds_tensor.data = mine.double()
    with pytest.raises(RuntimeError, match=r"ds_tensor of parameter 1\.bias: .*stays whole.*safe_set_full_fp32_param"):
        model[1].bias.ds_tensor[:1].zero_()


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("data", "memory"), ("data", "host"), ("data", "disk"), ("itself", "bf16"), ("index", "disk"),
        ("copy", "memory"), ("copy", "node"), ("view", "memory"), ("view", "disk"), ("out", "disk"),
    ],
)  # fmt: skip
def test_what_is_written_to_a_shard_is_the_parameters(how: str, where: str, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    section: dict[str, Any] = {
        "memory": {},
        "bf16": {"bf16": {"enabled": True}},
        "host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "disk": {"zero_optimization": {"offload_param": nvme | {"max_in_cpu": 0}, "offload_optimizer": nvme}},
        "node": {"zero_optimization": {"zero_hpz_partition_size": 2}},
    }[where]
    worlds.run(shard_written, how, section, ranks=2)


def construction(folder: str) -> None:
    file = Path(folder, f"config{deepspeed.comm.get_rank()}.json")
    file.write_text(json.dumps({"fp16": {"enabled": True}}))
    disk = {"device": "nvme", "nvme_path": folder}  # as Lightning's deepspeed_stage_3_offload_nvme says twice
    for arguments, dtype in (
        ({"config_dict_or_path": {"bf16": {"enabled": True}}}, torch.bfloat16),
        ({"config": {"bf16": {"enabled": False}}}, torch.float32),
        ({"config": str(file), "mem_efficient_linear": False, "pin_memory": True}, torch.float16),
        ({"dtype": torch.bfloat16, "remote_device": "none"}, torch.bfloat16),
        ({"remote_device": "nvme", "config": {"zero_optimization": {"offload_param": disk}}}, torch.float32),
        ({"data_parallel_group": torch.distributed.group.WORLD}, torch.float32),
        ({"mpu": SimpleNamespace(get_data_parallel_group=lambda: torch.distributed.group.WORLD)}, torch.float32),
        ({"mpu": SimpleNamespace(), "data_parallel_group": torch.distributed.group.WORLD}, torch.float32),
    ):
        with deepspeed.zero.Init(**arguments):
            layer = nn.Linear(4, 4)
        assert layer.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters(layer.weight):
            assert layer.weight.dtype == dtype
            assert layer.weight.isfinite().all()
    with deepspeed.zero.Init(enabled=False, mpu=SimpleNamespace()):
        layer = nn.Linear(4, 4)
    assert not hasattr(layer.weight, "ds_id")
    built = layer.weight.detach().clone()
    torch.distributed.broadcast(built, 0)
    deepspeed.zero.Init(module=layer)
    assert layer.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters(layer.weight, enabled=True, fwd_module=layer):
        assert layer.weight.detach().equal(built)
    with deepspeed.zero.GatheredParameters(layer.weight, enabled=False):
        assert layer.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE


def test_inits_arguments(tmp_path: Path) -> None:
    worlds.run(construction, str(tmp_path), ranks=2)


def paused() -> None:
    shards = []
    with deepspeed.zero.Init(), deepspeed.zero.Init(dtype=torch.bfloat16):
        for change in (None, partition_parameters.shutdown_init_context, partition_parameters.restore_init_context):
            if change is not None:
                change()
            weight = nn.Linear(4, 4).weight
            shards.append(hasattr(weight, "ds_id"))
    partition_parameters.restore_init_context()  # of blocks that are over, nothing
    assert [*shards, hasattr(nn.Linear(4, 4).weight, "ds_id")] == [True, False, True, False]


def test_init_pauses_inside_its_block() -> None:
    worlds.run(paused, ranks=2)


def test_external_parameters_need_no_word() -> None:
    deepspeed.zero.register_external_parameter(nn.Linear(1, 1), nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match="Parameter"):
        deepspeed.zero.register_external_parameter(nn.Linear(1, 1), torch.ones(1))
    assert partition_parameters.zero_wrapper_for_fp_tensor_constructor(torch.arange) is torch.arange


class Experts(nn.Module):
    """Which expert runs is another one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts[which](x)


def leaves(flag: bool) -> list[Any]:
    model = Experts()
    if flag:
        set_z3_leaf_modules(model, [Experts])
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    used = []
    for step in range(3):
        loss = engine(torch.ones(2, 8), which=(step + engine.group.rank) % 3).square().mean()
        engine.backward(loss)
        engine.step()
        used.append(sum(bool(units) for units in engine.stage.fetch.units_of.values()))
    return used


def test_a_leaf_module_is_gathered_whole() -> None:
    assert worlds.run(leaves, True, ranks=2) == [[1] * 3] * 2
    with pytest.raises(RankError, match="experts"):
        worlds.run(leaves, False, ranks=2)


def gathers(engine: deepspeed.DeepSpeedEngine) -> int:
    """The collectives of two forwards."""
    before = len(engine.group.ledger.events)
    with torch.no_grad():
        for _ in range(2):
            engine.module(torch.ones(2, 8))
    return len(engine.group.ledger.events) - before


def generated() -> bool:
    """Whether training goes on behind the block as without."""
    losses = []
    for inside in (False, True):
        torch.manual_seed(0)
        engine = deepspeed.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), config=CONFIG)[0]
        for step in range(3):
            if inside and step == 1:
                assert gathers(engine) > 0
                with deepspeed.zero.unwrap_model_for_generation(engine):
                    assert engine.module[0].weight.shape == (8, 8)
                    assert gathers(engine) == 0
                assert engine.module[0].weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
            loss = engine(torch.ones(2, 8)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses[:3] == losses[3:]


def test_generation_gathers_once() -> None:
    assert worlds.run(generated, ranks=2) == [True, True]
