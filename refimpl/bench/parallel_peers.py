"""One training step of each way to split a model, ours and torch's: `build(...)` gives `step() -> loss`.

    tensor      torch.distributed.tensor.parallel: parallelize_module, loss_parallel
    sequence    the same, SequenceParallel between the split layers
    pipeline    torch.distributed.pipelining: GPipe, 1F1B, interleaved 1F1B, zero bubble, ZB-V
    context     torch.distributed.tensor.experimental: the ring of context_parallel, over the same zigzag of tokens

context_parallel itself does not run on CPUs: its dispatcher knows the attention kernels of GPUs alone. Its ring does,
around the device's kernel, which is how it is called here; around both rings are the same model and our DDP.
Each peer gets what makes it fastest here. Its fused q, k, v stay fused, as ours do: the weight's rows are put into the
order in which cutting it into N equal parts gives every rank whole heads (three layers would send three times).
Parameters that are DTensors and those that are not are updated by one fused AdamW each, as torch asks.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.bench.peers import LEARNING_RATE, adamw, excuse_deprecated_collectives, plain_step, refimpl_stage
from refimpl.comm.group import Group
from refimpl.model.gpt import GPT
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.swap import Attend, ContextAttention, context_parallel
from refimpl.parallel.pipeline.runner import Loss, Pipeline
from refimpl.parallel.pipeline.schedules.table import Table
from refimpl.parallel.styles import gpt_plan
from refimpl.parallel.swap import parallelize
from refimpl.zero.ddp import DDP

Step = Callable[[], Tensor | None]  # -> this step's loss, on ranks that know it; the weights are updated

# Our name of a schedule -> torch's class.
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
ONE_STAGE = ("gpipe", "1f1b")  # torch's classes that take a stage, not a list of them


def tensor(model: GPT, group: Group, tokens: Tensor, targets: Tensor, sequence: bool) -> Step:
    """tokens, targets [B, T], the same on all ranks."""
    parallelize(model, gpt_plan(model.config.heads, model.config.vocab), group, sequence=sequence)
    return partial(plain_step(model, adamw(model.parameters())), tokens, targets)


def torch_tensor(model: GPT, group: Group, tokens: Tensor, targets: Tensor, sequence: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    excuse_deprecated_collectives()
    for name, p in model.named_parameters():
        if "qkv" in name:
            parts = p.data.view(3, group.size, -1, *p.shape[1:])  # q, k, v; ranks
            p.data = parts.transpose(0, 1).flatten(0, 2).contiguous()
    parallelize_module(model, init_device_mesh(group.device.type, (group.size,)), torch_plan(sequence))
    model.head.weight = model.wte.weight  # tied again: each has been split by itself
    plain = plain_step(model, one_for_each_kind(model.parameters()))

    def step() -> Tensor:
        with loss_parallel():
            return plain(tokens, targets)

    return step


def torch_plan(sequence: bool) -> dict[str, Any]:
    """Our `gpt_plan` in torch's words."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence else Replicate()  # the layout of [B, T, C] outside the split layers
    column, row = partial(ColwiseParallel, input_layouts=between), partial(RowwiseParallel, output_layouts=between)
    plan: dict[str, Any] = {
        "wte": row(input_layouts=Replicate()),
        "blocks.*.attention.qkv": column(),
        "blocks.*.attention.out": row(),
        "blocks.*.mlp.up": column(),
        "blocks.*.mlp.down": row(),
        "head": column(output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan |= {name: SequenceParallel() for name in ("blocks.*.ln1", "blocks.*.ln2", "ln")}
        plan["wpe"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    return plan


def one_for_each_kind(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused AdamW in a group for plain parameters and one for DTensors, which it refuses to mix."""
    from torch.distributed.tensor import DTensor

    kinds: dict[bool, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault(isinstance(p, DTensor), []).append(p)
    return torch.optim.AdamW([{"params": kind} for kind in kinds.values()], lr=LEARNING_RATE, fused=True)


def pipeline(
    table: Table, stages: dict[int, nn.Module], group: Group, loss: Loss, inputs: Tensor, targets: Tensor
) -> Step:
    """inputs, targets [m B, T, C], cut into m micro-batches."""
    runner = Pipeline(table, stages, group, loss)
    optimizer = adamw(p for stage in stages.values() for p in stage.parameters())
    m = table.micro_batches

    def step() -> Tensor | None:
        losses = runner.run(inputs.chunk(m), targets.chunk(m))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(list(losses.values())).mean() if losses else None

    return step


def torch_pipeline(
    table: Table, stages: dict[int, nn.Module], group: Group, loss: Loss, inputs: Tensor, targets: Tensor
) -> Step:
    from torch.distributed import pipelining

    parts = [pipelining.PipelineStage(stage, s, table.stages, group.device) for s, stage in stages.items()]
    build: Any = getattr(pipelining, SCHEDULES[table.name])
    schedule = build(parts[0] if table.name in ONE_STAGE else parts, n_microbatches=table.micro_batches, loss_fn=loss)
    optimizer = adamw(p for stage in stages.values() for p in stage.parameters())
    given: Sequence[Tensor] = [inputs] if 0 in stages else []

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        known = {"target": targets, "losses": losses} if table.stages - 1 in stages else {}
        schedule.step(*given, **known)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def context(model: GPT, group: Group, tokens: Tensor, targets: Tensor, attend: Attend | None = None) -> Step:
    """tokens, targets [B, T], the same on all ranks, each of which takes its zigzag. `attend`: ours by default."""
    layout = Layout(tokens.shape[1], group.size, zigzag=True)
    context_parallel(model, group, layout)
    for block in model.blocks:
        if attend and isinstance(block.attention, ContextAttention):
            block.attention.attend = attend
    step = refimpl_stage(model, group, torch.float32, DDP)
    return partial(step, layout.cut(tokens, group.rank), layout.cut(targets, group.rank))


def torch_context(model: GPT, group: Group, tokens: Tensor, targets: Tensor) -> Step:
    excuse_deprecated_collectives()
    return context(model, group, tokens, targets, lambda q, k, v: TorchRing.apply(q, k, v, group.handle))  # type: ignore[no-untyped-call]


class TorchRing(torch.autograd.Function):
    """torch's ring, causal, q, k, v [B, H, T/N, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, handle: Any) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        more: dict[str, Any] = {}
        if q.device.type != "cpu":  # the kernel of GPUs that takes fp32 too
            kernel = torch.ops.aten._scaled_dot_product_efficient_attention
            more = {"attn_bias": None, "compute_log_sumexp": True}
        out, lse, *rest = torchs_rings()._templated_ring_attention(handle, 2, kernel, q, k, v, is_causal=True, **more)
        ctx.save_for_backward(q, k, v, out, lse, *rest)
        ctx.handle = handle
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad, more = "grad_out", dict[str, Any]()
        q, k, v, out, lse, *rest = ctx.saved_tensors
        if q.device.type != "cpu":
            kernel, grad = torch.ops.aten._scaled_dot_product_efficient_attention_backward, "grad_out_"
            more = dict(zip(("philox_seed", "philox_offset"), rest, strict=True))
            more |= {"attn_bias": None, "grad_input_mask": [True, True, True, False]}
        dq, dk, dv, *_ = torchs_rings()._templated_ring_attention_backward(
            ctx.handle, 2, kernel, grads[0], grad, q, k, v, out, lse, is_causal=True, dropout_p=0.0, **more
        )
        return dq, dk, dv, None


def torchs_rings() -> Any:
    return importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
