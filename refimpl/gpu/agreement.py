"""Part 2: every stage ends with the same bits, with overlap and without, behind a resume too, and near a CPU's.

A GPU for each rank if there are two, by NCCL, with the sums in rank order (`deterministic`). Else two ranks share the
GPU and speak gloo: NCCL refuses two ranks on one GPU ("Duplicate GPU detected").
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.gpu.part import Finding
from refimpl.gpu.workload import STAGES, Workload, differing, largest_difference, train

Trained = tuple[dict[str, torch.Tensor], list[float]]  # the whole weights, the losses
NEAR = 3e-2  # of fp32 weights after 12 steps, relative to the largest of the tensor; other kernels round otherwise


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    small = device.type == "cpu"
    plain = Workload(width=64, layers=2, steps=2) if small else Workload()
    patience = seconds / 2  # with one training: of a hang each rank's place is told before this part is killed
    with launch.World(2, device=device.type) as world:
        yield Finding("library, with two ranks", world.call(library)[0])
        for dtype in (torch.float32, torch.bfloat16):
            workload = replace(plain, dtype=dtype)
            name = str(dtype).removeprefix("torch.")
            ends = {stage: world.call(trained, stage, workload, True, timeout=patience)[0] for stage in STAGES}
            first, losses = ends["ddp"]
            finite = all(torch.tensor(losses).isfinite())
            yield Finding(f"{name}: every loss is finite", {"first": losses[0], "last": losses[-1]}, finite)
            for stage in STAGES:
                without = world.call(trained, stage, replace(workload, overlap=False), True, timeout=patience)[0]
                parts = differing(ends[stage][0], first), differing(without[0], first)
                yield Finding(f"{name} {stage}: bits of DDP, and with overlap off", _names(parts), parts == ([], []))
            if dtype == torch.float32:
                native = world.call(trained, "zero2", workload, False, timeout=patience)[0]
                apart = largest_difference(native[0], first)
                yield Finding("float32: the library's own order of sums, largest difference", apart, apart < NEAR)
                gpu = first
        yield from resumed(world, workload, ends, patience)
    with launch.World(2, device="cpu") as world:
        apart = largest_difference(gpu, world.call(trained, "zero2", plain, True, timeout=patience)[0][0])
    yield Finding("float32: largest difference to a CPU", apart, apart < NEAR)


def resumed(world: launch.World, workload: Workload, ends: dict[str, Trained], patience: float) -> Iterator[Finding]:
    """Half way another stage goes on; under ZeRO-3 both of models that were made in shards."""
    for stage in STAGES:
        whole, half_way = ends[stage], replace(workload, resumes=True, in_shards=stage == "zero3")
        if half_way.in_shards:
            whole = world.call(trained, stage, replace(half_way, resumes=False), True, timeout=patience)[0]
        behind = world.call(trained, stage, half_way, True, timeout=patience)[0]
        parts = differing(behind[0], whole[0])
        yield Finding(f"bfloat16 {stage}: the same bits behind a resume", parts[:3] or "equal", not parts)


def library() -> str:
    return Group.world().backend


def trained(stage: str, workload: Workload, deterministic: bool) -> Trained:
    weights, losses = train(stage, workload, Group.world(deterministic=deterministic))
    return weights, losses


def _names(parts: tuple[list[str], list[str]]) -> Any:
    return [name for part in parts for name in part[:3]] or "equal"
