"""What the parts train: a small GPT, always the same batches, and every kernel deterministic."""

import io
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, Block, GPTConfig
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.init import Init
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: dict[str, type[Stage]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


@dataclass(frozen=True)
class Workload:
    """A GPT of `width` and `layers`, in `dtype`, for `steps` steps.

    `in_shards`: the model is made in shards on the device (ZeRO-3), whose random numbers are others. `resumes`: half
    way another stage goes on, from what the first has saved.
    """

    width: int = 256
    layers: int = 4
    steps: int = 12  # two processes on one GPU take turns of milliseconds: a step takes a tenth of a second
    dtype: torch.dtype = torch.float32
    overlap: bool = True
    in_shards: bool = False
    resumes: bool = False

    def gpt(self) -> GPTConfig:
        return GPTConfig(vocab=256, context=64, width=self.width, layers=self.layers, heads=max(1, self.width // 64))

    def stage(self, name: str, group: Group, check_order: bool = True) -> Stage:
        """A model in this stage, the same on every rank. Buckets are small, so that several are under way."""
        torch.manual_seed(0)
        with Init(group, self.dtype, enabled=self.in_shards):
            model = GPT(self.gpt()).to(group.device, self.dtype)
        size = 4 * self.width**2
        config = ZeroConfig(
            reduce_bucket_size=size,
            allgather_bucket_size=size,
            prefetch_bucket_size=4 * size,
            overlap_comm=self.overlap,
            leaf_modules=(Block,),
            check_order=check_order,
        )
        return STAGES[name](model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), group, config)

    def batch(self, step: int, rank: int) -> Tensor:
        """[2, 65] tokens."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randint(256, (2, 65), generator=generator)

    def step(self, stage: Stage, text: Tensor) -> Tensor:
        """One step on text [B, T+1] of the stage's device; the loss."""
        with sdpa_kernel(SDPBackend.MATH):
            loss: Tensor = stage.model(text[:, :-1], text[:, 1:])
            stage.backward(loss)
        stage.step()
        return loss.detach()


def train(name: str, workload: Workload, group: Group) -> tuple[dict[str, Tensor], list[float]]:
    """Every rank's own batches -> the whole weights on the host (rank 0), the losses."""
    torch.use_deterministic_algorithms(True)
    stage, losses = workload.stage(name, group), []
    for step in range(workload.steps):
        if workload.resumes and step == workload.steps // 2:
            stage = gone_on(stage, workload.stage(name, group))
        losses.append(workload.step(stage, workload.batch(step, group.rank).to(group.device)).item())
    weights = stage.full_state_dict() or {}
    return {key: value.to("cpu", copy=True) for key, value in weights.items()}, losses


def gone_on(stage: Stage, fresh: Stage) -> Stage:
    """`fresh`, with what this rank's file of `stage` would hold, read to the host as scripts read it."""
    file = io.BytesIO()
    torch.save(stage.state_dict(), file)
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue()), map_location="cpu"))
    return fresh


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit."""
    return [key for key in a.keys() | b.keys() if key not in a or key not in b or not _same(a[key], b[key])]


def _same(a: Tensor, b: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]  # so that NaN equals itself
    return torch.equal(a.view(bits), b.view(bits))


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Over all elements, relative to the largest weight of its tensor."""
    return max(float((a[k].double() - b[k].double()).abs().max() / b[k].double().abs().max()) for k in a)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
