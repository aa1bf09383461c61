"""Compressed gradients beside torch's communication hooks: the same GPT, batches and optimizer, in one race.

    PowerSGD     DDP with `Compression(PowerSGD(rank))`    torch DDP with `powerSGD_hook`, the same rank
    bf16, fp16   DDP with `communication_data_type`        torch DDP with `bf16_compress_hook`, `fp16_compress_hook`

Both of every pair take turns on the same ranks. torch's PowerSGD sends its first two steps whole; they are warm-up
here. Its bf16 hook is refused on gloo by its name alone, so it is called by another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from refimpl import launch
from refimpl.bench.peers import BUCKET, Step, adamw, plain_step, text_of
from refimpl.bench.race import Times, Turns, race, slowest
from refimpl.comm.group import Group
from refimpl.compress.compression import Compression
from refimpl.compress.powersgd import PowerSGD
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP

ONE_BUCKET = 10_000  # MB: with two, torch's PowerSGD on gloo begins their all-reduces in another order on each rank
PAIRS = ("PowerSGD", "bf16", "fp16")
HEAT = ("ranks", "parameters", "rank")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Row:
    """Median steps of the slowest rank. `ratio`: ours to torch's, 0.5 is twice as fast. `rank`: PowerSGD's."""

    wire: str
    ranks: int
    parameters: int
    rank: int
    ours_ms: float
    torch_ms: float
    ratio: float


def ours(model: nn.Module, group: Group, pair: str, rank: int) -> Step:
    compression = Compression(PowerSGD(rank)) if pair == "PowerSGD" else None
    config = ZeroConfig(reduce_bucket_size=BUCKET, compression=compression, communication_data_type=DTYPES.get(pair))
    stage = DDP(model, adamw(model.parameters()), group, config)
    return plain_step(model, stage.optimizer)


def torchs(model: nn.Module, group: Group, pair: str, rank: int) -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if pair == "PowerSGD":
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET, gradient_as_bucket_view=True)
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}

        def compress_hook(
            state: Any,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            return hooks[pair](state, bucket)

        wrapped.register_comm_hook(dist.group.WORLD, compress_hook)
    return plain_step(wrapped, adamw(model.parameters()))


def heat(gpt: GPTConfig, batch: int, turns: Turns, rank: int) -> Times:
    """Runs on every rank: both of every pair take turns."""
    group = Group.world()
    text = text_of(group, batch, gpt.context)
    contestants: dict[str, Callable[[], object]] = {}
    for pair in PAIRS:
        for name, build in (("ours", ours), ("torch", torchs)):
            torch.manual_seed(0)
            step = build(GPT(gpt).to(group.device), group, pair, rank)
            contestants[f"{pair} {name}"] = partial(step, text[:, :-1], text[:, 1:])
    return race(group, contestants, turns)


def measure(ranks: int, gpt: GPTConfig, batch: int, turns: Turns, rank: int = 4) -> list[Row]:
    """A row a pair; `batch`: sequences a rank. The untimed turns must hold two steps, which torch sends whole."""
    times = slowest(launch.run(heat, gpt, batch, turns, rank, ranks=ranks, timeout=600))
    ms = {name: median(steps) for name, steps in times.items()}
    both = [(pair, ms[f"{pair} ours"], ms[f"{pair} torch"]) for pair in PAIRS]
    return [Row(pair, ranks, gpt.parameters, rank, mine, theirs, mine / theirs) for pair, mine, theirs in both]
