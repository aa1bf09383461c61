"""LAMB in every stage: a parameter that is cut across ranks has the norm of the whole, so the bits of one process."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from training import STAGES, Job, Net, differing, lamb, oracle, train
from worlds import run

from refimpl.comm.group import Group
from refimpl.optim.lamb import Lamb
from refimpl.optim.loss_scale import DynamicLossScaler
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero3 import Zero3

every_stage = pytest.mark.parametrize("stage", list(STAGES))


JOB = Job(optimizer=lamb)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@every_stage
def test_the_bits_of_one_process(stage: str, ranks: int) -> None:
    """Tied, frozen, unused and odd-sized parameters; buckets whose shards cut parameters anywhere."""
    assert differing(run(train, stage, JOB, ranks=ranks)[0].weights, oracle(ranks, JOB)) == []


def test_the_norm_of_a_part_gives_other_weights() -> None:
    """Else the test above would not tell a norm of the rank's own part from one of the whole."""

    def parts(model: nn.Module) -> Lamb:
        optimizer = lamb(model)
        optimizer.__class__ = type("PartNorms", (Lamb,), {"layerwise": False, "elementwise": True})
        return optimizer

    assert differing(run(train, "zero1", replace(JOB, optimizer=parts), ranks=2)[0].weights, oracle(2, JOB)) != []


def test_all_stages_agree_bit_for_bit_in_fp16_with_an_overflow_and_clipping() -> None:
    job = Job(
        optimizer=lamb, dtype=torch.float16, clip=0.05, poison=(2, 1), scaler=lambda: DynamicLossScaler(256.0),
        micro_batches=2,
    )  # fmt: skip
    outcomes = [run(train, stage, replace(job, micro_batches=1), ranks=3)[0] for stage in STAGES]
    for out in outcomes:
        assert out.done == [True, True, False, True, True]
        assert differing(out.weights, outcomes[0].weights or {}) == []


@every_stage
def test_its_message_is_16_bytes_a_parameter(stage: str) -> None:
    out = run(train, stage, JOB, ranks=2)[0]
    tensors = len([p for p in Net().parameters() if p.requires_grad])
    assert out.sent_by_tag.get("whole squares", 0) == (0 if stage == "ddp" else 16 * tensors)


def test_a_rank_that_holds_nothing_takes_part() -> None:
    """64 elements of one shard hold all of the model: the other ranks have padding."""

    def few() -> None:
        group = Group.world()
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        twin = nn.Linear(3, 2)
        twin.load_state_dict(model.state_dict())
        stage = Zero1(model, Lamb(model.parameters(), lr=0.1), group)
        alone = Lamb(twin.parameters(), lr=0.1)
        for _ in range(3):
            for net, optimizer in ((model, stage.optimizer), (twin, alone)):
                net(torch.ones(1, 3)).square().sum().backward()
                for p in twin.parameters():  # (g + g + g) / 3 is not g to the last bit
                    p.grad = p.grad if p.grad is None else (p.grad + p.grad + p.grad) / group.size
                optimizer.step()
                optimizer.zero_grad()
        state = stage.state_dict()
        stage.load_state_dict(state)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)

    run(few, ranks=3)


def test_let_go_it_is_an_ordinary_optimizer() -> None:
    def free() -> None:
        model = nn.Linear(40, 40)
        optimizer = Lamb(model.parameters(), lr=0.1)
        stage = Zero3(model, optimizer)
        stage.release()
        if torch.distributed.get_rank() == 0:  # alone: a norm over ranks would wait for ever
            model(torch.ones(1, 40)).sum().backward()
            optimizer.step()

    run(free)
