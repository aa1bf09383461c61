"""One training step, written with each library: `build(model, group, dtype)` gives `step(tokens, targets) -> loss`.

    stage 0   torch DistributedDataParallel
    stage 1   DistributedDataParallel + ZeroRedundancyOptimizer
    stage 2   FSDP2, reshard_after_forward=False: parameters are gathered once a step, gradients reduce-scattered
    stage 3   FSDP2, reshard_after_forward=True (the default): gathered for forward and again for backward
    any       DeepSpeed, where it is installed
    any       compute alone: plain torch on each rank by itself, which trains another model on each

All of them, ours included, train with torch's fused AdamW. In bf16 weights, gradients and messages are bf16, and each
keeps fp32 masters of what it updates: FSDP2 by MixedPrecisionPolicy, DDP and ZeroRedundancyOptimizer by `MasterAdamW`.

Each peer gets the options that make it fastest here: gradients as views of the buckets in DDP; in FSDP2 one unit a
transformer block, as ZeRO-3's leaf modules, and a root that is not freed between forward and backward, as its manual
advises. Tried and left out, since none stood out of the noise on gloo (10M parameters, 2 ranks; at most 4% less CPU
time a step): static_graph, buckets of 5, 10 and 100 MB and batched_grad_copy in DDP; explicit prefetch by one and two
units, asynchronous unsharding, two reduce-scatter buffers, SUM in place of AVG and units of two blocks in FSDP2. An int
for reshard_after_forward shards over fewer ranks, more memory than ZeRO-3 keeps. DeepSpeed has its own defaults.
"""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from refimpl.bench.masters import MasterAdamW
from refimpl.comm.group import Group
from refimpl.model.gpt import Block
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

Step = Callable[[Tensor, Tensor], Tensor]  # tokens [B, T], targets [B, T] -> this rank's loss; the weights are updated
Build = Callable[[nn.Module, Group, torch.dtype], Step]

BUCKET = 10_000_000  # elements: few, large messages, since two cores have little room for overlap
LEARNING_RATE = 1e-4
ALONE = "compute alone"
Stage = DDP | Zero1 | Zero2 | Zero3
STAGES: tuple[type[Stage], ...] = (DDP, Zero1, Zero2, Zero3)


@dataclass(frozen=True)
class Implementation:
    """A way to train at one ZeRO stage; `build` is handed an fp32 model. Role "alone" does not communicate."""

    name: str
    build: Build
    role: Literal["ours", "peer", "alone"] = "peer"


def implementations(stage: int, with_deepspeed: bool = True) -> list[Implementation]:
    """Ours, its peers (torch's, and DeepSpeed's where it is installed) and compute alone at ZeRO stage 0 to 3.

    IndexError for another stage.
    """
    racers = [
        Implementation(f"refimpl {STAGES[stage].__name__}", partial(refimpl_stage, kind=STAGES[stage]), "ours"),
        torchs_own(stage),
    ]
    found = importlib.util.find_spec("deepspeed")
    if with_deepspeed and found is not None and found.origin is not None:  # a folder of that name is no package
        racers.append(Implementation(f"DeepSpeed stage {stage}", partial(deepspeed_stage, stage=stage)))
    return [*racers, Implementation(ALONE, alone, "alone")]


def torchs_own(stage: int, unit: type[nn.Module] = Block) -> Implementation:
    """What torch has for a ZeRO stage; FSDP2 gathers each `unit` by itself."""
    return (
        Implementation("torch DDP", torch_ddp),
        Implementation("torch ZeroRedundancy", torch_zero1),
        Implementation("torch FSDP2 stage 2", partial(torch_fsdp2, reshard=False, unit=unit)),
        Implementation("torch FSDP2 stage 3", partial(torch_fsdp2, reshard=True, unit=unit)),
    )[stage]


def text_of(group: Group, batch: int, context: int) -> Tensor:
    """[batch, context + 1] bytes: tokens and targets, each rank's own."""
    draw = torch.Generator().manual_seed(group.rank)
    return torch.randint(256, (batch, context + 1), generator=draw).to(group.device)


def adamw(parameters: Iterable[Tensor], lr: float = LEARNING_RATE) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def with_masters(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for `model`, with masters where its weights are not fp32."""
    low = next(model.parameters()).dtype != torch.float32
    return MasterAdamW(model.parameters(), lr=LEARNING_RATE) if low else adamw(model.parameters())


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step of plain torch and of every torch wrapper: they reduce in backward's own hooks."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def alone(model: nn.Module, group: Group, dtype: torch.dtype) -> Step:
    model.to(dtype)
    return plain_step(model, with_masters(model))


def refimpl_stage(model: nn.Module, group: Group, dtype: torch.dtype, kind: type[Stage]) -> Step:
    # As FSDP2 is set up: a unit a block, and what backward needs first (the root, the last block) is not freed before.
    config = ZeroConfig(
        reduce_bucket_size=BUCKET,
        prefetch_bucket_size=BUCKET,
        leaf_modules=(Block,),
        max_reuse_distance=1,
        dtype=dtype,
    )
    return engine_step(model, kind(model, adamw(model.parameters()), group, config=config))


def engine_step(model: nn.Module, engine: Any) -> Step:
    """The step of what has a backward and a step of its own: our stages, DeepSpeed's engine."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def wrap_ddp(model: nn.Module, group: Group) -> nn.Module:
    devices = [group.device] if group.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def torch_ddp(model: nn.Module, group: Group, dtype: torch.dtype) -> Step:
    wrapped = wrap_ddp(model.to(dtype), group)
    return plain_step(wrapped, with_masters(model))


def torch_zero1(model: nn.Module, group: Group, dtype: torch.dtype) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = wrap_ddp(model.to(dtype), group)
    kind: dict[str, Any] = {"optimizer_class": MasterAdamW}
    if dtype == torch.float32:
        kind = {"optimizer_class": torch.optim.AdamW, "fused": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), parameters_as_bucket_view=True, lr=LEARNING_RATE, **kind)
    return plain_step(wrapped, optimizer)


def torch_fsdp2(
    model: nn.Module, group: Group, dtype: torch.dtype, reshard: bool, unit: type[nn.Module] = Block
) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    excuse_deprecated_collectives()
    mesh = init_device_mesh(group.device.type, (group.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in model.modules():
        if isinstance(module, unit):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    return plain_step(model, adamw(model.parameters()))


def deepspeed_stage(model: nn.Module, group: Group, dtype: torch.dtype, stage: int) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", group.device.type)
    deepspeed = importlib.import_module("deepspeed")
    excuse_deprecated_collectives()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # its default is 1.0, which the others do not do
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    optimizer = adamw(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for state in optimizer.state.values():  # its stage 0 has made a step without gradients, to have state in 16 bits:
        state["step"].zero_()  # bias correction would be a step ahead, and the first update 0.74 of the others'
    return engine_step(engine, engine)


def excuse_deprecated_collectives() -> None:
    """torch 2.13 warns at collectives that its own FSDP2 and DeepSpeed call: do not charge them for printing it."""
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
