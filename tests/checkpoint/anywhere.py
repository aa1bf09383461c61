"""Runs that are saved at one stage and world size and go on at another: what the tests of that share."""

from pathlib import Path

import torch
from torch import Tensor, nn
from training import Net, tokens

import refimpl
from refimpl.zero.portable import parts


class Late(Net):
    """What no micro-batch of the first steps uses, the later ones do: histories differ inside a bucket."""

    def forward(self, tokens: Tensor) -> Tensor:
        late = self.unused.weight.sum() if self.late else 0
        return super().forward(tokens) + late

    late = False


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; not fused, which gives the same bits wherever a shard is cut."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=False, foreach=False)


def engine_of(stage: int, bucket: int, section: str = "fp32", seed: int = 0) -> refimpl.Engine:
    zero = {"stage": stage, "reduce_bucket_size": bucket, "stage3_param_persistence_threshold": bucket % 100}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "gradient_clipping": 0.0}
    config |= {"checkpoint": {"load_universal": True}}
    if section != "fp32":
        config[section] = {"enabled": True}
    torch.manual_seed(seed)
    model = Late()
    return refimpl.initialize(model=model, optimizer=optimizer(model), config=config)[0]


def train(engine: refimpl.Engine, steps: range) -> None:
    for step in steps:
        engine.module.late = step >= 3
        engine.backward(engine(tokens(step, engine.group.rank)))
        engine.step()


def mine(engine: refimpl.Engine) -> dict[str, Tensor]:
    """This rank's part of the weights in full precision, and of every state."""
    found: dict[str, Tensor] = {}
    for part in parts(engine.stage):
        state = part.state | {key: value.reshape(1) for key, value in part.rest.items()}
        found |= {part.name: part.weight.clone()} | {f"{key} {part.name}": v.clone() for key, v in state.items()}
    return found


def joined(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All ranks' parts, one behind the other."""
    names = {name for rank in ranks for name in rank}
    return {name: torch.cat([rank[name] for rank in ranks if name in rank]) for name in names}


def begin(stage: int, bucket: int, section: str, folder: Path) -> dict[str, Tensor]:
    engine = engine_of(stage, bucket, section)
    train(engine, range(2))
    engine.save_checkpoint(folder)
    return mine(engine)


def go_on(stage: int, bucket: int, section: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = engine_of(stage, bucket, section, seed=9)
    engine.load_checkpoint(folder)
    loaded = mine(engine)
    train(engine, range(2, 5))
    return loaded, mine(engine)
