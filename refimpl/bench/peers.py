"""One training step, written with each library: `build(model, group)` gives `step(tokens, targets) -> loss`.

    stage 0   torch DistributedDataParallel
    stage 1   DistributedDataParallel + ZeroRedundancyOptimizer
    stage 2   FSDP2, reshard_after_forward=False: parameters are gathered once a step, gradients reduce-scattered
    stage 3   FSDP2, reshard_after_forward=True (the default): gathered for forward and again for backward
    any       DeepSpeed, where it is installed

All of them, ours included, train with `torch.optim.AdamW(fused=True)`, and each peer gets the options that make it
fastest here: gradients as views of the buckets, and one FSDP2 unit a transformer block, as ZeRO-3's leaf modules.
"""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.model.gpt import Block
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

Step = Callable[[Tensor, Tensor], Tensor]  # tokens [B, T], targets [B, T] -> this rank's loss; the weights are updated
Build = Callable[[nn.Module, Group], Step]

BUCKET = 10_000_000  # elements: few, large messages, since two cores have little room for overlap
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Implementation:
    """A way to train at one ZeRO stage. `ours` marks this package, the rest are peers."""

    name: str
    build: Build
    ours: bool = False


def implementations(stage: int) -> list[Implementation]:
    """Ours and its peers at ZeRO stage 0 to 3. KeyError for another stage."""
    ours: dict[int, type[DDP | Zero1 | Zero2 | Zero3]] = {0: DDP, 1: Zero1, 2: Zero2, 3: Zero3}
    peers = {
        0: Implementation("torch DDP", torch_ddp),
        1: Implementation("torch ZeroRedundancy", torch_zero1),
        2: Implementation("torch FSDP2 stage 2", lambda model, group: torch_fsdp2(model, group, False)),
        3: Implementation("torch FSDP2 stage 3", lambda model, group: torch_fsdp2(model, group, True)),
    }
    racers = [
        Implementation(f"refimpl {ours[stage].__name__}", lambda m, g: refimpl_stage(ours[stage], m, g), ours=True)
    ]
    racers.append(peers[stage])
    found = importlib.util.find_spec("deepspeed")
    if found is not None and found.origin is not None:  # a folder of that name is no package
        racers.append(Implementation(f"DeepSpeed stage {stage}", lambda m, g: deepspeed_stage(stage, m, g)))
    return racers


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def refimpl_stage(kind: type[DDP | Zero1 | Zero2 | Zero3], model: nn.Module, group: Group) -> Step:
    # As FSDP2 is set up: a unit a block, and what backward needs first (the root, the last block) is not freed before.
    config = ZeroConfig(
        reduce_bucket_size=BUCKET, prefetch_bucket_size=BUCKET, leaf_modules=(Block,), max_reuse_distance=1
    )
    stage = kind(model, adamw(model.parameters()), group, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        stage.backward(loss)
        stage.step()
        return loss.detach()

    return step


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step of every torch wrapper: they reduce in backward's own hooks."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def excuse_deprecated_collectives() -> None:
    """torch 2.13 warns at collectives that its own FSDP2 and DeepSpeed call: do not charge them for printing it."""
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)


def wrap_ddp(model: nn.Module, group: Group) -> nn.Module:
    devices = [group.device] if group.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def torch_ddp(model: nn.Module, group: Group) -> Step:
    return plain_step(wrap_ddp(model, group), adamw(model.parameters()))


def torch_zero1(model: nn.Module, group: Group) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = wrap_ddp(model, group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, fused=True
    )
    return plain_step(wrapped, optimizer)


def torch_fsdp2(model: nn.Module, group: Group, reshard: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    excuse_deprecated_collectives()
    mesh = init_device_mesh(group.device.type, (group.size,))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return plain_step(model, adamw(model.parameters()))


def deepspeed_stage(stage: int, model: nn.Module, group: Group) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", group.device.type)
    deepspeed = importlib.import_module("deepspeed")
    excuse_deprecated_collectives()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # its default is 1.0, which the others do not do
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config, dist_init_required=False
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
