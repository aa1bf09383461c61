"""1-bit Adam, 0/1 Adam and 1-bit LAMB on real ranks against the papers' algorithms in one process, and in bytes."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from one_bit_oracle import Named, Play, one_bit_adam, one_bit_lamb, zero_one_adam
from torch import nn
from training import Job, Net, train
from worlds import run

from refimpl.optim.one_bit_adam import OneBitAdam
from refimpl.optim.one_bit_lamb import OneBitLamb
from refimpl.optim.zero_one_adam import ZeroOneAdam

RANKS = (2, 3, 4)


def groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim < 2]}]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return OneBitAdam(groups(model), lr=1e-2, freeze_step=3, weight_decay=0.1, bias_correction=False)


def corrected(model: nn.Module) -> torch.optim.Optimizer:
    return OneBitAdam(groups(model), lr=1e-2, freeze_step=3, weight_decay=0.1)


def zero_one(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroOneAdam(
        groups(model), lr=1e-2, bias_correction=False, var_freeze_step=5, var_update_scaler=2, local_step_scaler=3,
        local_step_clipper=2,
    )  # fmt: skip


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return OneBitLamb(groups(model), lr=1e-2, freeze_step=3, weight_decay=0.1, max_coeff=0.5, bias_correction=False)


CASES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], Callable[[Play], Named]]] = {
    "one_bit_adam": (adam, partial(one_bit_adam, steps=8, freeze=3, lr=1e-2, decay=0.1, corrected=False)),
    "corrected": (corrected, partial(one_bit_adam, steps=8, freeze=3, lr=1e-2, decay=0.1, corrected=True)),
    "zero_one_adam": (zero_one, partial(zero_one_adam, steps=12, freeze=5, kappa=2, scaler=3, most=2, lr=1e-2)),
    "one_bit_lamb": (lamb, partial(one_bit_lamb, steps=8, freeze=3, lr=1e-2, decay=0.1, top=0.5)),
}
every_one = pytest.mark.parametrize("name", list(CASES))


@pytest.mark.parametrize("ranks", RANKS)
@every_one
def test_the_papers_algorithm(name: str, ranks: int) -> None:
    """Tied, frozen, unused and odd-sized parameters; chunks of servers that end anywhere."""
    make, play = CASES[name]
    steps = 12 if name == "zero_one_adam" else 8
    out = run(train, "ddp", Job(steps=steps, optimizer=make), ranks=ranks)[0]
    expected = play(Play(Net, groups, ranks, 700))
    assert out.weights is not None
    for key, value in expected.items():
        torch.testing.assert_close(out.weights[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
