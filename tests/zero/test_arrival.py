"""Where a gradient is put when it arrives: on 16 bytes, at once or when its bucket is full, and nothing beside it."""

import pytest
import torch
from torch import Tensor, nn
from training import STAGES, Net, tokens

from refimpl.comm.group import Group
from refimpl.launch import run
from refimpl.zero.config import ZeroConfig
from refimpl.zero.reduction import filling


def steps(stage_name: str, small: int, micro_batches: int) -> dict[str, Tensor]:
    """Runs on every rank: two steps of the net with odd sizes -> the full weights of rank 0. `small`: what is kept."""
    filling.SMALL = small
    group = Group.world()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stage = STAGES[stage_name](model, optimizer, group, ZeroConfig(reduce_bucket_size=1_000))
    for step in range(2):
        for a in range(micro_batches):
            stage.backward(model(tokens(step, a * group.size + group.rank)), sync=a == micro_batches - 1)
        for p in model.parameters():
            assert p.grad is None or p.grad.shape == p.shape
        stage.step()
    return stage.full_state_dict() or {}


@pytest.mark.parametrize("stage", list(STAGES))
def test_copying_a_bucket_at_once_changes_no_bit(stage: str) -> None:
    one_by_one, at_once = (run(steps, stage, small, 2, ranks=3)[0] for small in (0, 1 << 14))
    assert one_by_one.keys() == at_once.keys()
    assert [name for name in one_by_one if not torch.equal(one_by_one[name], at_once[name])] == []


def layers() -> nn.Module:
    """Under ZeRO-2, a parameter a bucket: a bias's bucket fills the buffer that a weight's has left."""
    return nn.Sequential(nn.Linear(10, 12), nn.Linear(12, 10), nn.Linear(10, 12), nn.Linear(12, 10))


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_begins_on_16_bytes_and_the_padding_stays_zero(dtype: torch.dtype, reused: bool) -> None:
    def work() -> tuple[list[int], list[float], int]:
        model = layers() if reused else Net()
        config = ZeroConfig(dtype=dtype, **({"reduce_bucket_size": 1} if reused else {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        stage = STAGES["zero2" if reused else "ddp"](model, optimizer, config=config)
        starts = [p.data_ptr() % 16 for bucket in stage.buckets for p in bucket.params]
        for step in range(2):
            if reused:
                stage.backward(model(torch.ones(2, 10, dtype=dtype)).square().mean())
            else:
                stage.backward(model(tokens(step, stage.group.rank)))
            stage.step()
        padding = [bucket.full[bucket.padding].float().abs().sum().item() for bucket in stage.buckets]
        params = sum(p.numel() for bucket in stage.buckets for p in bucket.params)
        return starts, padding, sum(b.padded - len(b.padding) for b in stage.buckets) - params

    for starts, padding, difference in run(work, ranks=2):
        assert set(starts) == {0}
        assert set(padding) == {0.0}
        assert difference == 0
