"""Written by DeepSpeed itself: the checkpoints in written.tar.xz, which `refimpl checkpoint import` must read.

    PYTHONPATH=<a folder with DeepSpeed 0.19> DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
        torchrun --nproc-per-node 2 tests/checkpoint/deepspeed_written/write.py OUT

makes OUT/zero1-fp32/, ... each with a checkpoint and expected.pt: the weights as DeepSpeed's own zero_to_fp32 reads
them. `tar -cJf written.tar.xz -C OUT .` then makes the fixture.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn


class Net(nn.Module):
    """Tied weights, a frozen layer, odd sizes, a buffer of each kind, two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.middle(self.embed(x))) * self.scale.to(self.embed.weight.dtype)
        return self.head(hidden).float().square().mean()


def write(out: Path, stage: int, section: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    }
    if section != "fp32":
        config[section] = {"enabled": True}
    model = Net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1 and p.requires_grad], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2 and p.requires_grad], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(3):
        loss = engine(torch.tensor([step, 2 * engine.global_rank + 1], device=engine.device))
        engine.backward(loss)
        engine.step()
    folder = out / f"zero{stage}-{section}"
    engine.save_checkpoint(str(folder), client_state={"epoch": 4, "best": (0.5, None)})
    if engine.global_rank == 0:
        torch.save(get_fp32_state_dict_from_zero_checkpoint(str(folder)), folder / "expected.pt")
        for copied in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / copied).unlink(missing_ok=True)
    torch.distributed.barrier()
    engine.destroy()


if __name__ == "__main__":
    for stage in (1, 2, 3):
        for section in ("fp32", "bf16"):
            write(Path(sys.argv[1]), stage, section)
