"""Kernels beside eager torch, torch.compile and Liger-Kernel, and beside what the machine can do.

What it can do is measured in the same run: bytes a second of a plain copy, FLOPs a second of a large matrix product. A
kernel's bytes are those that it must move (its docstring's formula), so a share below 1 counts what it moves in vain
too. On a GPU the kernels are Triton's, compiled; on a CPU they are torch's own operators, at smaller sizes, and what is
compared is torch.compile (C++ made by inductor, where there is a compiler) with eager.
Every way gets inputs of its own, made from one seed; a peer that raises is listed with its error's name, and one whose
first calls take longer than PATIENCE with a TimeoutError; `off` is its greatest difference from eager's result.
"""

import importlib.util
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config

from refimpl.kernels.case import Case, cases, outputs, wave
from refimpl.ranks.causes import causes

HEAT = ("case",)
TURNS, SAMPLES, SECONDS = 3, 20, 0.1  # of each way; in a turn at most so many calls, and about so long
PATIENCE = 40.0  # seconds for a peer's first calls: inductor's C++ of ten rounds of integers is not done in 15 minutes


@dataclass(frozen=True)
class Row:
    """One way to do one pass. A rate is of the bytes or FLOPs that the pass must move or do."""

    case: str
    step: str  # forward or backward
    way: str
    ms: float | None
    tb_s: float | None
    tflop_s: float | None
    of_limit: float | None  # the rate's share of the copy's or the matrix product's
    beside_eager: float | None  # its time, divided by eager's
    off: float | None  # from eager's result, as a part of its greatest entry
    note: str = ""


@dataclass(frozen=True)
class Limits:
    """Of this machine, by measurement."""

    bytes_s: float
    flops_s: float


def measure(word: str = "", seconds: float = 420.0, device: torch.device | None = None) -> Iterator[list[Row]]:
    """The limits, then every case whose name holds `word`; after `seconds` only ours and eager's."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [case for case in cases(small=device.type == "cpu") if word in case.name]
    if not chosen:
        raise ValueError(f"no kernel's case has {word!r} in its name")
    deadline = time.monotonic() + seconds
    torch._logging.set_logs(dynamo=logging.ERROR)  # type: ignore[attr-defined]  # no warning for each break of a graph
    limits, rows = find_limits(device)
    yield rows
    for case in chosen:
        yield list(heat(case, device, limits, deadline))


def find_limits(device: torch.device) -> tuple[Limits, list[Row]]:
    size, width = (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 1024)
    a, b = torch.zeros(2, size, dtype=torch.uint8, device=device).unbind()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, y = torch.randn(2, width, width, device=device, dtype=dtype).unbind()
    ms = timed({("", "copy"): lambda: b.copy_(a), ("", "product"): lambda: x @ y}, device)
    copy, product = 2 * size / ms["", "copy"] * 1e3, 2 * width**3 / ms["", "product"] * 1e3
    ways = ((f"copy, {size >> 20} MiB", copy, None), (f"product, {width} cubed", None, product))
    rows = [
        Row("limits of this machine", "", way, None, moved and moved / 1e12, done and done / 1e12, None, None, None)
        for way, moved, done in ways
    ]
    return Limits(copy, product), rows


Way = tuple[Callable[..., Any] | None, str]


def ways(case: Case, device: torch.device, in_time: bool) -> dict[str, Way]:
    """Name -> the function, or None and why it is not there."""
    found: dict[str, Way] = {"ours": (case.call, ""), "eager": (case.reference, "")}
    found |= {name: (peer, "") for name, peer in (case.peers or {}).items()}
    if not in_time:
        return found | {"compile": (None, "no time was left")}
    compiler = device.type == "cuda" or any(
        shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")
    )
    found["compile"] = (torch.compile(case.reference, dynamic=False), "") if compiler else (None, "no C++ compiler")
    if device.type == "cuda" and (peer := liger(case.operation)):
        found["liger"] = (peer, "")
    return found


def heat(case: Case, device: torch.device, limits: Limits, deadline: float) -> Iterator[Row]:
    """Each pass of a case by each way; the ways take turns, so that noise falls on all of them."""
    calls: dict[tuple[str, str], Callable[[], object]] = {}  # (step, way) -> the pass
    results: dict[tuple[str, str], list[Tensor]] = {}  # what it gave the first time
    absent = []
    with config.patch(donated_buffer=False):  # or a compiled backward runs only once
        for way, (call, note) in ways(case, device, time.monotonic() < deadline).items():
            if call is None:
                absent.append(Row(case.name, "", way, None, None, None, None, None, None, note))
                continue
            try:
                with at_most(PATIENCE if way not in ("ours", "eager") else 0):
                    found = [(step, once, outputs(once())) for step, once in passes(call, case, device)]
                for step, once, made in found:
                    results[step, way] = [y.detach().clone() for y in made]
                    calls[step, way] = once
            except Exception as error:
                if way in ("ours", "eager"):
                    raise
                absent.append(Row(case.name, "", way, None, None, None, None, None, None, why(error)))
        ms = timed(calls, device)
    for step, way in sorted(calls, key=lambda key: key[0] != "forward"):
        moved, flops = (case.moved, case.flops) if step == "forward" else (case.moved_backward, case.flops_backward)
        t, share = ms[step, way], flops / limits.flops_s if flops else moved / limits.bytes_s
        rate = flops / t / 1e9 if flops else None
        off = greatest_difference(results[step, way], results[step, "eager"])
        row = (case.name, step, way, t, moved / t / 1e9, rate, share / t * 1e3, t / ms[step, "eager"], off)
        yield Row(*row)
    yield from absent


def why(error: BaseException) -> str:
    """A peer's error in a word; a compiler wraps what stopped it, our patience included."""
    late = any(isinstance(layer, TimeoutError) for layer in causes(error))
    return f"not there after {PATIENCE:g} s" if late else type(error).__name__


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TimeoutError in the middle of what takes longer; 0 is for ever."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def passes(call: Callable[..., Any], case: Case, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(forward or backward, the pass on inputs of its own)."""
    torch.manual_seed(0)
    inputs = case.inputs(device)
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    yield "forward", lambda: call(*inputs)
    if leaves and case.moved_backward:
        found = [y for y in outputs(call(*inputs)) if y.requires_grad]
        grads = [wave(y) for y in found]
        yield "backward", lambda: torch.autograd.grad(found, leaves, grads, retain_graph=True)


def timed(calls: dict[tuple[str, str], Callable[[], object]], device: torch.device) -> dict[tuple[str, str], float]:
    """Each pass's median milliseconds, over three turns."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(TURNS):
        for key, call in calls.items():
            times[key] += samples(call, device)
    return {key: median(taken) for key, taken in times.items()}


def liger(operation: str) -> Callable[..., Any] | None:
    """Liger-Kernel's function for an operation of ours, its own defaults; None where it has none or is not there."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import functional as theirs

    found: dict[str, Callable[..., Any]] = {
        "rms_norm": theirs.liger_rms_norm,
        "layer_norm": lambda x, weight, bias: theirs.liger_layer_norm(x, weight, bias, 1e-5),
        "softmax": theirs.liger_softmax,
        "cross_entropy": theirs.liger_cross_entropy,
        "linear_cross_entropy": theirs.liger_fused_linear_cross_entropy,
        "swiglu": theirs.liger_swiglu,
        "geglu": theirs.liger_geglu,
    }
    return found.get(operation)


def samples(call: Callable[[], object], device: torch.device) -> list[float]:
    """Milliseconds of some calls; on a GPU between events, without waiting in between, so that launches overlap."""
    on_gpu, begun = device.type == "cuda", time.monotonic()
    call()
    if on_gpu:
        torch.cuda.synchronize(device)
    count = max(2, min(SAMPLES, int(SECONDS / max(time.monotonic() - begun, 1e-6))))
    if not on_gpu:
        marks = [time.perf_counter()]
        for _ in range(count):
            call()
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in pairwise(marks)]
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def greatest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """As a part of the greatest entry of `theirs`."""
    pairs = [(a.float(), b.float()) for a, b in zip(ours, theirs, strict=False) if a.numel()]
    return max((float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs), default=0.0)
