"""Compressed gradients beside torch's communication hooks: the same GPT, batches and optimizer, in one race.

    PowerSGD     DDP with `Compression(PowerSGD(rank))`    torch DDP with `powerSGD_hook`, the same rank
    bf16, fp16   DDP with `communication_data_type`        torch DDP with `bf16_compress_hook`, `fp16_compress_hook`

`measure(ranks=2)` gives each pair's ratio of step times, ours to torch's. torch's PowerSGD sends its first two steps
whole; they are warm-up here. Its bf16 hook is refused on gloo by its name alone, so it is called by another.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from refimpl import launch
from refimpl.bench.peers import BUCKET, Step, adamw, plain_step, wrap_ddp
from refimpl.bench.race import Times, race, slowest
from refimpl.bench.zero import Workload
from refimpl.comm.group import Group
from refimpl.compress.compression import Compression
from refimpl.compress.powersgd import PowerSGD
from refimpl.model.gpt import GPT
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP

PAIRS = ("PowerSGD", "bf16", "fp16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def ours(model: nn.Module, group: Group, pair: str, rank: int) -> Step:
    compression = Compression(PowerSGD(rank)) if pair == "PowerSGD" else None
    config = ZeroConfig(reduce_bucket_size=BUCKET, compression=compression, communication_data_type=DTYPES.get(pair))
    stage = DDP(model, adamw(model.parameters()), group, config)
    return plain_step(model, stage.optimizer)


def torchs(model: nn.Module, group: Group, pair: str, rank: int) -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrapped: nn.parallel.DistributedDataParallel = wrap_ddp(model, group)  # type: ignore[assignment]
    if pair == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}

        def compress_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            return hooks[pair](state, bucket)

        wrapped.register_comm_hook(dist.group.WORLD, compress_hook)
    return plain_step(wrapped, adamw(model.parameters()))


def heat(workload: Workload, rank: int) -> Times:
    """Runs on every rank: both of every pair take turns."""
    group = Group.world()
    text = torch.randint(
        256, (workload.batch, workload.context + 1), generator=torch.Generator().manual_seed(group.rank)
    )
    contestants: dict[str, Callable[[], object]] = {}
    for pair in PAIRS:
        for name, build in (("ours", ours), ("torch", torchs)):
            torch.manual_seed(0)
            step = build(GPT(workload.gpt).to(group.device), group, pair, rank)
            contestants[f"{pair} {name}"] = partial(step, text[:, :-1], text[:, 1:])
    return race(group, contestants, workload.turns)


def measure(ranks: int = 2, workload: Workload | None = None, rank: int = 4) -> dict[str, tuple[float, float, float]]:
    """Of each pair: milliseconds of our step and of torch's, the median over steps of the slowest rank; their ratio."""
    times = slowest(launch.run(heat, workload or Workload(), rank, ranks=ranks, timeout=600))
    found = {pair: (median(times[f"{pair} ours"]), median(times[f"{pair} torch"])) for pair in PAIRS}
    return {pair: (mine, theirs, mine / theirs) for pair, (mine, theirs) in found.items()}
