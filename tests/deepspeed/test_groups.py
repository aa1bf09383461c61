"""deepspeed.utils.groups answers for the axes of the engine, and tp_model_init asks for some."""

import pytest
import torch
import torch.distributed as dist
from worlds import run

import refimpl.deepspeed as deepspeed
from refimpl import launch
from refimpl.deepspeed.grid import _halves
from refimpl.deepspeed.module_inject import layers
from refimpl.deepspeed.pipe import PipeModelDataParallelTopology
from refimpl.deepspeed.runtime.pipe.topology import PipelineParallelGrid
from refimpl.deepspeed.utils import groups
from refimpl.engine.configuration.keys import ConfigError
from refimpl.model.gpt import GPT, GPTConfig

SHAPE = GPTConfig(vocab=19, context=8, width=64, layers=2, heads=4)
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}


def answers(how: str) -> tuple[dict[str, int], list[int], list[list[int]]]:
    """Sizes, ranks and groups, after an engine with two tensor ranks, or two that share sequences."""
    deepspeed.init_distributed()
    model = GPT(SHAPE)
    if how != "sequence":
        config = {**CONFIG, "bf16": {"enabled": True}}
        whole, mpu = sum(p.numel() for p in model.parameters()), None
        if how == "groups":
            mpu = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=2))
        group = mpu and mpu.get_slice_parallel_group()  # as in Ray's guide; else as transformers does
        model = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.bfloat16, config=config, tp_group=group)
        assert next(model.parameters()).dtype == torch.bfloat16
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        assert sum(p.numel() for p in engine.module.parameters()) < whole
        assert engine.autotp_size() == 2
        for kind in (layers.LinearLayer, layers.LinearAllreduce):  # as optimum-habana asks whether a model is cut
            assert any(isinstance(module, kind) for module in engine.module.modules())
        assert engine.data_parallel_group is groups._get_data_parallel_group()
    else:
        engine, *_ = deepspeed.initialize(model=model, config=CONFIG, mesh_param=(2, 2))
        assert engine.get_sequence_parallel_group() is groups._get_sequence_parallel_group()
    assert engine.get_data_parallel_rank() == groups._get_data_parallel_rank()
    assert engine.get_model_parallel_rank() == groups.get_tensor_model_parallel_rank()
    engine.train_batch(iter([(torch.zeros(1, 8, dtype=torch.int64),) * 2]))
    sizes = {
        "data": groups._get_data_parallel_world_size(),
        "averaged": groups._get_sequence_data_parallel_world_size(),
        "sequence": groups._get_sequence_parallel_world_size(),
        "tensor": groups.get_tensor_model_parallel_world_size(),
    }
    places = [
        groups._get_data_parallel_rank(), groups._get_sequence_parallel_rank(), groups.get_tensor_model_parallel_rank(),
    ]  # fmt: skip
    handles = (
        groups._get_data_parallel_group(), groups._get_sequence_data_parallel_group(),
        groups._get_sequence_parallel_group(), groups.get_tensor_model_parallel_group(),
    )  # fmt: skip
    return sizes, places, [dist.get_process_group_ranks(h) if h else [] for h in handles]


def test_tensor_ranks() -> None:
    for rank, (sizes, places, ranks) in enumerate(run(answers, "tensor", ranks=4)):
        assert sizes == {"data": 2, "averaged": 2, "sequence": 1, "tensor": 2}
        assert places == [rank // 2, 0, rank % 2]
        replicas = [rank % 2, rank % 2 + 2]
        assert ranks == [replicas, replicas, [rank], [rank // 2 * 2, rank // 2 * 2 + 1]]


def test_a_model_behind_tp_model_init_is_cut_along_the_callers_groups() -> None:
    assert run(answers, "groups", ranks=4) == run(answers, "tensor", ranks=4)


def cut_along_even_and_odd() -> None:
    """The caller's tensor ranks are 0 and 2, 1 and 3; no mpu says so."""
    deepspeed.init_distributed()
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    model = deepspeed.tp_model_init(GPT(SHAPE), tp_size=2, dtype=torch.float32, tp_group=group)
    deepspeed.initialize(model=model, config=CONFIG)


def test_a_group_of_other_ranks_than_initializes_own_needs_an_mpu() -> None:
    with pytest.raises(launch.RankError, match=r"tp_group has ranks \[., .\], and .* over \[., .\]: give it the mpu"):
        run(cut_along_even_and_odd, ranks=4)


def sums_of_ones() -> list[float]:
    """Over tensor, sequence and data ranks, before an engine and behind one of data parallelism alone."""
    deepspeed.init_distributed()
    asked = groups.get_tensor_model_parallel_group, groups._get_sequence_parallel_group, groups._get_data_parallel_group
    found = [torch.ones(1) for _ in asked * 2]
    for total, group in zip(found[:3], asked, strict=True):
        dist.all_reduce(total, group=group())
    deepspeed.initialize(model=torch.nn.Linear(2, 2), config=CONFIG)
    for total, group in zip(found[3:], asked, strict=True):
        dist.all_reduce(total, group=group())
    return [total.item() for total in found]


def test_a_rank_alone_on_an_axis_has_a_group_of_its_own() -> None:
    """None would be all ranks to torch, and to `DistributedAttention`, which then mixes their sequences."""
    assert run(sums_of_ones, ranks=2) == [[1.0, 1.0, 2.0] * 2] * 2


def test_a_configuration_that_contradicts_tp_model_init_is_refused() -> None:
    model = deepspeed.tp_model_init(GPT(SHAPE), tp_size=2, dtype=torch.float32)
    with pytest.raises(ConfigError, match="autotp_size is 4, and tp_model_init was asked for 2"):
        deepspeed.initialize(model=model, config=CONFIG | {"tensor_parallel": {"autotp_size": 4}})
    half = deepspeed.tp_model_init(GPT(SHAPE), tp_size=1, dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"is for torch\.bfloat16, and tp_model_init was asked for torch\.float16"):
        deepspeed.initialize(model=half, config=CONFIG | {"bf16": {"enabled": True}})


def test_sequence_ranks() -> None:
    for rank, (sizes, places, ranks) in enumerate(run(answers, "sequence", ranks=4)):
        assert sizes == {"data": 2, "averaged": 4, "sequence": 2, "tensor": 1}
        assert places == [rank // 2, rank % 2, 0]
        assert ranks == [[rank % 2, rank % 2 + 2], [0, 1, 2, 3], [rank // 2 * 2, rank // 2 * 2 + 1], [rank]]


def gridded() -> tuple[list[int], list[int], list[int], int, int]:
    """A rank's groups and places on a grid of 2 stages, 1 replica, 2 slices, and the rank of the other stage."""
    deepspeed.init_distributed()
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    total = torch.tensor([grid.get_global_rank()])
    dist.all_reduce(total, group=grid.get_slice_parallel_group())
    assert total.item() == sum(grid.slice_group)
    places = [grid.get_stage_id(), grid.get_data_parallel_rank(), grid.get_slice_parallel_rank()]
    whole = [grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()]
    halves = PipelineParallelGrid()  # 2 x 2: of a number of ranks alone
    assert (halves.pipe_parallel_size, halves.data_parallel_size) == (2, 2)
    return places, whole, grid.pp_group, grid.stage_to_global(1 - grid.stage_id), len(grid.dp_group)


def test_a_grid_of_a_topology() -> None:
    for rank, found in enumerate(run(gridded, ranks=4)):
        places = [rank // 2, 0, rank % 2]
        assert found == (places, [rank, 4], [rank % 2, rank % 2 + 2], (rank + 2) % 4, 1)


def test_prime_factors_are_stages_and_replicas_in_turn() -> None:
    assert [_halves(ranks) for ranks in (1, 2, 4, 6, 8, 12)] == [(1, 1), (2, 1), (2, 2), (2, 3), (4, 2), (6, 2)]


def sum_of_two() -> float:
    """Over the two ranks that share experts."""
    deepspeed.init_distributed()
    total = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(total, group=groups.expert_ranks(2)[0].handle)
    return total.item()


def test_ranks_that_stay_forget_the_layout_of_the_call_before() -> None:
    with launch.World(ranks=4, device="cpu") as world:
        assert [world.call(sum_of_two) for _ in range(2)] == [[3.0, 3.0, 7.0, 7.0]] * 2
