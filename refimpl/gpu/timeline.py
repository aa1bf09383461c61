"""Part 6: two warm steps under the profiler. What of the communication runs while something is computed?

With a GPU for each rank that is NCCL's. On one GPU the twins' copies stand in: their bytes cross no link, so only the
counts of kernels and the host's time mean anything there.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.comm.streams import streams_of
from refimpl.gpu.part import Finding
from refimpl.gpu.twins import Twins
from refimpl.gpu.workload import STAGES, Workload

Spans = list[tuple[float, float]]
STEPS = 2


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    workload = Workload(width=64, layers=2) if device.type == "cpu" else Workload(width=512, layers=8)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        with launch.World(torch.cuda.device_count(), device="cuda") as world:  # one: NCCL takes seconds to begin
            for stage in STAGES:
                yield Finding(f"{stage}, NCCL", world.call(of_world, stage, workload, timeout=seconds / 2)[0])
        return
    for stage in STAGES:
        streams = streams_of(device)
        group = Group(None, device=device, streams=streams, transport=Twins(1, 4, streams, lambda: None))
        yield Finding(f"{stage}, twins", profiled(stage, workload, group))


def of_world(stage: str, workload: Workload) -> dict[str, Any]:
    return profiled(stage, workload, Group.world())


def profiled(name: str, workload: Workload, group: Group) -> dict[str, Any]:
    """Per step: kernels, milliseconds of the host and of the device, and the share of communication that is hidden.

    In words that no kernel was seen: CUPTI, by which the profiler sees them, does not work in every container.
    """
    stage = workload.stage(name, group, check_order=False)
    texts = [workload.batch(step, group.rank).to(group.device) for step in range(3 + STEPS)]
    for text in texts[:3]:
        workload.step(stage, text)
    on_gpu = group.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        begun = time.perf_counter()
        for text in texts[3:]:
            workload.step(stage, text)
        host = (time.perf_counter() - begun) * 1e3 / STEPS
        if on_gpu:
            torch.cuda.synchronize(group.device)
    events: list[Any] = list(profiler.events() or [])
    if not on_gpu:
        return {"operations": len(events) / STEPS, "host ms": host}
    kernels = kernels_of(events)
    if not kernels:
        return {"kernels": "none seen: CUPTI, by which torch's profiler sees them, does not work here", "host ms": host}
    by_stream: dict[int, Spans] = {}
    for kernel in kernels:
        by_stream.setdefault(kernel.device_resource_id, []).append((kernel.time_range.start, kernel.time_range.end))
    computing = max(by_stream, key=lambda stream: len(by_stream[stream]))
    compute = merged(by_stream.pop(computing))
    other = merged([span for spans in by_stream.values() for span in spans])
    busy = length(merged(compute + other))
    hidden = 1 - (busy - length(compute)) / length(other) if other else 0.0
    return {
        "kernels": len(kernels) / STEPS,
        "host ms": host,
        "device busy ms": busy / 1e3 / STEPS,
        "communication ms": length(other) / 1e3 / STEPS,
        "of it hidden": hidden,
    }


def kernels_of(events: list[Any]) -> list[Any]:
    """Those that ran on the device. What a `record_function` spans is told there too, and is no kernel."""
    return [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]


def merged(spans: Spans) -> Spans:
    """The same times, without overlaps, in order."""
    result: Spans = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
