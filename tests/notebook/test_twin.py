"""What chapters measure: the stage's own bytes, and the bits of one process."""

import torch

from refimpl.model.gpt import GPTConfig
from refimpl.notebook import twin

TINY = GPTConfig(context=32, width=32, layers=1, heads=2)


def test_a_stage_ends_with_the_bits_of_its_twin_in_its_own_order_of_additions():
    measured = twin.measure("zero2", TINY, ranks=2, micro_batches=2, dtype=torch.float32, reduce_bucket_size=5_000)
    own, other = (twin.one_process(TINY, 2, 2, ranks_first) for ranks_first in (True, False))
    assert twin.equal(measured.weights, own)
    assert not twin.equal(measured.weights, other)
    assert not twin.equal(measured.weights, {})


def test_bytes_are_those_of_the_last_step():
    measured = twin.measure("zero1", TINY, ranks=2, dtype=torch.float32, steps=3, reduce_bucket_size=5_000)
    once = measured.layout.padded * 4 // 2  # Psi b (N-1)/N
    assert measured.sent_for["gradients"] == measured.sent_for["parameters"] == once
    assert measured.sent["reduce_scatter"] == measured.sent["all_gather"] == once
    assert measured.calls_for["gradients"] == measured.layout.buckets
    assert measured.kept["parameters"] == measured.layout.padded * 4
