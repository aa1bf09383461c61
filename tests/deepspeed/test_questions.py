"""What a script asks DeepSpeed's engine about single keys of its file."""

from typing import Any

import pytest
import torch
from torch import nn

import refimpl.deepspeed as deepspeed
from refimpl.engine.questions import KEYS

FILE: dict[str, Any] = {
    "train_batch_size": 1,
    "dataloader_drop_last": True,
    "gradient_predivide_factor": 2.0,
    "prescale_gradients": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
    "flops_profiler": {"enabled": True, "profile_step": -1, "module_depth": 3, "top_modules": 4, "detailed": False},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1234, "allgather_bucket_size": 4321, "overlap_comm": True},
}


def test_they_are_what_the_file_says() -> None:
    engine: Any = deepspeed.initialize(model=nn.Linear(2, 2), config=FILE)[0]
    assert [engine.zero_reduce_bucket_size(), engine.zero_allgather_bucket_size()] == [1234, 4321]
    assert engine.optimizer_params() == {"lr": 0.25}
    assert engine.scheduler_params() is None, "no such section"
    assert [engine.flops_profiler_module_depth(), engine.flops_profiler_top_modules()] == [3, 4]
    assert [engine.flops_profiler_enabled(), engine.flops_profiler_detailed()] == [True, False]
    assert [engine.torch_autocast_enabled(), engine.torch_autocast_dtype()] == [True, torch.bfloat16]
    assert [engine.postscale_gradients(), engine.gradient_predivide_factor()] == [False, 2.0]
    assert [engine.zero_overlap_comm(), engine.dataloader_drop_last(), engine.random_ltd_enabled()] == [
        True,
        True,
        False,
    ]


def test_each_has_an_answer() -> None:
    engine: Any = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})[0]
    for name in KEYS:
        getattr(engine, name)()
    assert engine.zero_offload_optimizer() is engine.zero_offload_param() is None
    assert engine.zero_overlap_comm() is engine.zero_use_cpu_optimizer() is False
    assert engine._optimizer_has_ckpt_event_prologue() is False
    assert engine.torch_autocast_dtype() is None
    assert engine.communication_data_type == torch.float32


@pytest.mark.parametrize("dtype", ["fp32", None])
def test_the_wire_is_asked_for(dtype: str | None) -> None:
    file = {"train_batch_size": 1, "bf16": {"enabled": True}, "communication_data_type": dtype}
    engine: Any = deepspeed.initialize(model=nn.Linear(2, 2), config=file)[0]
    assert engine.communication_data_type == (torch.float32 if dtype else torch.bfloat16)
    offloaded = {"train_batch_size": 1, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config=offloaded)[0]
    assert engine.zero_offload_optimizer().device == "cpu"
    assert engine.zero_use_cpu_optimizer()
