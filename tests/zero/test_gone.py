"""A stage that nobody has any more is gone, with its memory, its files and its place in the group: sweeps make many."""

import gc
import weakref

import pytest
import torch
from test_plain_loop import batch, every_stage, small
from test_shared import files
from training import STAGES
from worlds import run

from refimpl.comm.group import Group


@every_stage
@pytest.mark.parametrize("stays", [False, True], ids=["its own group", "a group that stays"])
def test_a_stage_that_nobody_has_is_gone(stage: str, stays: bool) -> None:
    def check() -> None:
        gc.collect()  # what the last test left
        group, before = Group.world() if stays else None, files()

        def train() -> list[weakref.ref[object]]:
            model = small()
            optimizer = torch.optim.AdamW(model.parameters())
            held = STAGES[stage](model, optimizer, group)
            for step in range(2):
                model(batch(step, held.group.rank)).square().mean().backward()
                optimizer.step()
            return [weakref.ref(one) for one in (model, optimizer, held, held.gradients, next(model.parameters()))]

        kept = train()
        assert len(files()) > len(before)
        gc.collect()
        assert [one() for one in kept] == [None] * len(kept)
        assert (files() == before) is not stays

    run(check, ranks=2)
