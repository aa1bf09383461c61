"""Which of what autograd saves is a parameter in another dtype, and can be made again."""

import torch
from torch import nn

from refimpl.zero.gather.watch import source_of


def test_only_a_plain_copy_has_a_source() -> None:
    weight = nn.Parameter(torch.randn(2, 3, 4, 5))
    assert source_of(weight.bfloat16()) is weight
    assert source_of(weight.bfloat16().flatten(1).t()) is weight, "a view of one too"
    changed = weight.bfloat16()
    with torch.no_grad():
        changed.mul_(2)
    assert source_of(changed) is None
    assert source_of(weight.to(torch.bfloat16, memory_format=torch.channels_last)) is None, (
        "made again it lies otherwise"
    )
    assert source_of(weight * 2) is None
    assert source_of(torch.ones(3)) is None
