"""The batch triple, against a search over all triples."""

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest

from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
GIVEN = [{}, *({name: size} for name in NAMES for size in (1, 2, 6, 12))]


def allowed(given: dict[str, int], world_size: int) -> set[tuple[int, int, int]]:
    """All triples with train = micro x steps x world that agree with `given`; one step where nothing asks for more."""
    sizes = range(1, 300)
    found = set()
    for micro, steps in product(sizes[:20], sizes[:20]):
        triple = dict(zip(NAMES, (micro * steps * world_size, micro, steps), strict=True))
        if all(triple[name] == size for name, size in given.items()):
            found.add(tuple(triple.values()))
    if len(found) > 1:  # one number only: DeepSpeed then takes one micro-batch a step
        found = {triple for triple in found if triple[2] == 1}
    return found if "train_batch_size" in given or "train_micro_batch_size_per_gpu" in given else set()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_combination(world_size: int) -> None:
    for parts in product([None, 1, 2, 6, 12], repeat=3):
        given: dict[str, Any] = {name: size for name, size in zip(NAMES, parts, strict=True) if size is not None}
        expected = allowed(given, world_size)
        if not expected:
            with pytest.raises(ConfigError):
                load_config(given, world_size=world_size)
            continue
        loaded = load_config(given, world_size=world_size)
        assert {tuple(getattr(loaded, name) for name in NAMES)} == expected


@pytest.mark.parametrize("two", [2, "2"])
@pytest.mark.parametrize(("train", "fits"), [(12, True), (24, True), (48, False)])
def test_tensor_ranks_may_be_counted_where_all_three_are_given(train: int, fits: bool, two: Any) -> None:
    """As DeepSpeed counts, and transformers for "auto": 3 ranks with different data, each beside one with the same."""
    given = dict(zip(NAMES, (train, 2, 2), strict=True)) | {"tensor_parallel": {"autotp_size": two}}
    if fits:
        assert load_config(given, world_size=3).train_batch_size == 12
    else:
        with pytest.raises(ConfigError, match=r"train_batch_size = 48, but .* = 12"):
            load_config(given, world_size=3)


@pytest.mark.parametrize(
    ("tensor", "train", "told"), [(2, 24, "4.* takes 2"), (2, 12, "2.* takes 1"), (2, 6, ""), (1, 24, "")]
)
def test_where_deepspeed_would_accumulate_less_is_told(tensor: int, train: int, told: str) -> None:
    given = {NAMES[0]: train, NAMES[1]: 2, "tensor_parallel": {"autotp_size": tensor}}
    with pytest.warns(ConfigWarning, match=f"gradient_accumulation_steps: {told}") if told else nullcontext():
        assert load_config(given, world_size=3).gradient_accumulation_steps == train // 6
    load_config(given, world_size=3, rank=1)  # one rank tells it


def test_errors_show_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(dict(zip(NAMES, (33, 4, 2), strict=True)), world_size=4)
    assert "train_batch_size = 33" in str(error.value)
    assert "train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x world size 4 = 32" in str(error.value)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps cannot be computed.*10.*4 x world size 2 = 8"):
        load_config({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, world_size=2)
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu cannot be computed.*7.*world size 2 = 2"):
        load_config({"train_batch_size": 7}, world_size=2)
    with pytest.raises(ConfigError, match="neither train_batch_size nor train_micro_batch_size_per_gpu"):
        load_config({"gradient_accumulation_steps": 2}, world_size=2)


@pytest.mark.parametrize("size", [0, -1, 1.5, "many", True])
def test_sizes_are_positive_whole_numbers(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size = .* whole number of at least 1"):
        load_config({"train_batch_size": size}, world_size=1)
