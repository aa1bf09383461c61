"""Batch arithmetic and configurations for any values, drawn by hypothesis: what is written is what is read."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from refimpl.engine.config import load_config
from refimpl.engine.configuration.batch import MICRO, STEPS, TRAIN, complete
from refimpl.engine.configuration.keys import ConfigError

SIZES = st.integers(1, 10**6)


@given(SIZES, SIZES, SIZES, st.sampled_from([{TRAIN, MICRO}, {TRAIN, STEPS}, {MICRO, STEPS}, {TRAIN, MICRO, STEPS}]))
def test_any_two_sizes_give_the_third(micro: int, steps: int, ranks: int, known: set[str]) -> None:
    triple = {TRAIN: micro * steps * ranks, MICRO: micro, STEPS: steps}
    assert complete({name: size for name, size in triple.items() if name in known}, ranks) == triple


@given(SIZES, SIZES, SIZES, SIZES)
def test_sizes_that_do_not_multiply_are_refused_with_both_sides(train: int, micro: int, steps: int, ranks: int) -> None:
    product = micro * steps * ranks
    assume(train != product)
    with pytest.raises(ConfigError, match=rf"= {train}\b.* = {product}\b"):
        complete({TRAIN: train, MICRO: micro, STEPS: steps}, ranks)


@given(SIZES, st.integers(1, 50), SIZES)
def test_a_batch_that_does_not_divide_is_refused_and_one_that_does_is_not(micro: int, ranks: int, more: int) -> None:
    product = micro * ranks
    assert complete({TRAIN: product * more, MICRO: micro}, ranks)[STEPS] == more
    assume(more % product)
    with pytest.raises(ConfigError, match=f"{STEPS} cannot be computed: .*not a multiple of"):
        complete({TRAIN: more, MICRO: micro}, ranks)


RATES = st.floats(1e-8, 1.0)
ZERO = {
    "stage": st.integers(0, 3),
    "overlap_comm": st.booleans(),
    "reduce_bucket_size": st.integers(1, 10**9),
    "allgather_bucket_size": st.integers(1, 10**9),
    "stage3_prefetch_bucket_size": st.integers(0, 10**9),
    "stage3_param_persistence_threshold": st.integers(0, 10**6),
    "stage3_max_live_parameters": st.integers(0, 10**9),
}
ADAM = {
    "lr": RATES,
    "betas": st.tuples(st.floats(0.0, 0.99), st.floats(0.0, 0.999)).map(list),
    "eps": st.floats(1e-12, 1e-3),
    "weight_decay": st.floats(0.0, 1.0),
}
CONFIGS = st.fixed_dictionaries(
    {MICRO: st.integers(1, 64), "optimizer": st.fixed_dictionaries({"type": st.sampled_from(["Adam", "AdamW"])})},
    optional={
        STEPS: st.integers(1, 64),
        "gradient_clipping": st.floats(0.0, 10.0),
        "prescale_gradients": st.booleans(),
        "bf16": st.fixed_dictionaries({"enabled": st.booleans()}),
        "zero_optimization": st.fixed_dictionaries({}, optional=ZERO),
    },
)


def found(settings: Any, written: dict[str, Any]) -> dict[str, Any]:
    """What the loaded settings say where something was written."""
    return {
        name: found(getattr(settings, name), value) if isinstance(value, dict) and name != "params"
        else getattr(settings, name)
        for name, value in written.items()
    }  # fmt: skip


@given(CONFIGS, st.fixed_dictionaries({}, optional=ADAM), st.integers(1, 8))
def test_what_is_written_is_what_is_read_from_a_dictionary_and_from_a_file(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], params: dict[str, Any], ranks: int
) -> None:
    config["optimizer"]["params"] = params
    file: Path = tmp_path_factory.getbasetemp() / "config.json"
    file.write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # knobs that have no effect in the chosen stage
        loaded = load_config(config, world_size=ranks)
        assert load_config(file, world_size=ranks) == loaded
    assert found(loaded, config) == config
    assert loaded.train_batch_size == config[MICRO] * config.get(STEPS, 1) * ranks
