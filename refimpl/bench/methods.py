"""Ways to train a data-parallel model that send less than DDP does, each as one function of a model and a group.

They differ in what travels: gradients in a shorter form, 1-bit momenta after a warm-up, or weights every so many steps.
All have AdamW's learning rate but those of LAMB, whose layers' steps are scaled by their weights' norms.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from refimpl.bench.peers import adamw
from refimpl.comm.group import Group
from refimpl.compress.blocks import Blocks
from refimpl.compress.compression import Compression
from refimpl.compress.compressor import Compressor
from refimpl.compress.powersgd import PowerSGD
from refimpl.compress.randomk import RandomK
from refimpl.compress.sign import Sign
from refimpl.compress.topk import TopK
from refimpl.optim.diloco import DiLoCo
from refimpl.optim.lamb import Lamb
from refimpl.optim.local_sgd import LocalSGD, Meeting
from refimpl.optim.one_bit_adam import OneBitAdam
from refimpl.optim.one_bit_lamb import OneBitLamb
from refimpl.optim.zero_one_adam import ZeroOneAdam
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP

LR, LAMB_LR = 3e-4, 1e-2
PERIOD = 8  # steps between two meetings; times are taken over whole periods
Step = Callable[[Tensor], None]  # backward, and all that follows until the weights are new
Make = Callable[[nn.Module, Group, int, float], Step]  # (model, group, steps of warm-up, times the learning rate)


@dataclass(frozen=True)
class Method:
    """`warms_up`: its first steps send what DDP's do."""

    name: str
    make: Make
    warms_up: bool = False


def ddp(optimizer: Callable[..., torch.optim.Optimizer], lr: float, **config: object) -> Make:
    """Gradients are averaged in every step, as the config says."""

    def make(model: nn.Module, group: Group, warm_up: int, pace: float) -> Step:
        stage = DDP(model, optimizer(model.parameters(), pace * lr), group, ZeroConfig(**config))  # type: ignore[arg-type]
        return by_stage(stage)

    return make


def compressed(operator: Compressor) -> Make:
    return ddp(adamw, LR, compression=Compression(operator))


def travelling(optimizer: type[OneBitAdam] | type[OneBitLamb] | type[ZeroOneAdam], freeze: str, lr: float = LR) -> Make:
    """Momenta travel once `freeze`, the name of an argument of the optimizer, says so."""

    def make(model: nn.Module, group: Group, warm_up: int, pace: float) -> Step:
        one_bit = optimizer(model.parameters(), pace * lr, **{freeze: warm_up}, comm_backend_name="gloo")  # type: ignore[arg-type]
        return by_stage(DDP(model, one_bit, group, ZeroConfig()))

    return make


def meeting(kind: type[LocalSGD] | type[DiLoCo]) -> Make:
    """Each rank trains by itself; weights are averaged every PERIOD steps."""

    def make(model: nn.Module, group: Group, warm_up: int, pace: float) -> Step:
        optimizer, ranks = adamw(model.parameters(), pace * LR), kind(model, PERIOD, group)
        return by_meeting(optimizer, ranks)

    return make


def by_stage(stage: DDP) -> Step:
    def step(loss: Tensor) -> None:
        stage.backward(loss)
        stage.step()

    return step


def by_meeting(optimizer: torch.optim.Optimizer, ranks: Meeting) -> Step:
    def step(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        ranks.step()

    return step


FIRST = "DDP"
METHODS = (
    Method(FIRST, ddp(adamw, LR)),
    Method("DDP, bf16 wire", ddp(adamw, LR, communication_data_type=torch.bfloat16)),
    Method("top-k 1%", compressed(TopK(0.01))),
    Method("random-k 1%", compressed(RandomK(0.01))),
    Method("int8 blocks", compressed(Blocks(8))),
    Method("int4 blocks", compressed(Blocks(4))),
    Method("sign", compressed(Sign())),
    Method("PowerSGD rank 4", compressed(PowerSGD(4))),
    Method("1-bit Adam", travelling(OneBitAdam, "freeze_step"), warms_up=True),
    Method("0/1 Adam", travelling(ZeroOneAdam, "var_freeze_step"), warms_up=True),
    Method("LAMB", ddp(Lamb, LAMB_LR)),
    Method("1-bit LAMB", travelling(OneBitLamb, "freeze_step", LAMB_LR), warms_up=True),
    Method(f"local SGD, every {PERIOD}", meeting(LocalSGD)),
    Method(f"DiLoCo, every {PERIOD}", meeting(DiLoCo)),
)
