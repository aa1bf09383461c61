"""`refimpl bench one-bit`: its rows beside what they are compared with."""

import pytest

from refimpl.bench.one_bit import measure, table
from refimpl.model.gpt import GPTConfig


def test_rows_of_what_was_asked_for_and_of_its_peer() -> None:
    adam, one_bit = measure(["OneBitAdam"], GPTConfig(vocab=256, context=16, width=32, layers=1, heads=2), 2, 5)
    assert (adam.optimizer, one_bit.optimizer) == ("AdamW", "OneBitAdam")
    assert adam.of_fp16 == pytest.approx(2.0, rel=0.01), "fp32 travels"
    assert 1 / 16 < one_bit.of_fp16 < 1 / 14
    assert one_bit.of_uncompressed == one_bit.loss / adam.loss
    assert "| OneBitAdam |" in table([adam, one_bit])
