"""`refimpl bench one-bit`: its rows beside what they are compared with, and how near the losses are."""

import math
import warnings

import pytest
import worlds

from refimpl.bench.one_bit import BESIDE, measure, table, train
from refimpl.model.gpt import GPTConfig

BAND = 1.04  # times the loss of what it compresses


def test_rows_of_what_was_asked_for_and_of_its_peer() -> None:
    adam, one_bit = measure(["OneBitAdam"], GPTConfig(vocab=256, context=16, width=32, layers=1, heads=2), 2, 5)
    assert (adam.optimizer, one_bit.optimizer) == ("AdamW", "OneBitAdam")
    assert adam.of_fp16 == pytest.approx(2.0, rel=0.01), "fp32 travels"
    assert 1 / 16 < one_bit.of_fp16 < 1 / 14
    assert one_bit.of_uncompressed == one_bit.loss / adam.loss
    assert "| OneBitAdam |" in table([adam, one_bit])


def learned() -> dict[str, float]:
    """Runs on every rank: the loss that each optimizer comes to on the demo's text."""
    model = GPTConfig(vocab=256, context=32, width=48, layers=1, heads=2)
    with warnings.catch_warnings():
        return {name: train(name, model, steps=400, batch=4)[0] for name in BESIDE}


def test_400_steps_end_within_a_stated_band_of_what_is_compressed() -> None:
    """320 of them compressed; docs/benchmarks.md gives a larger model's figures."""
    losses = worlds.run(learned)[0]
    for name, peer in BESIDE.items():
        assert losses[name] < BAND * losses[peer], losses
        assert losses[peer] < 0.6 * math.log(256), "where it began: there was something to learn"
