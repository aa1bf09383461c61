"""Which modules ZeRO-3 gathers whole: flagged by hand, or found by a configuration, which flags them too."""

import pytest
from torch import nn

import refimpl.deepspeed as deepspeed
from refimpl.engine.configuration.keys import ConfigWarning
from refimpl.zero.gather.unit import unit_of


class Inner(nn.Linear):
    pass


def test_leaf_flags() -> None:
    model = nn.Sequential(Inner(4, 4), nn.Sequential(Inner(4, 4), nn.Tanh()))
    flags = deepspeed.utils
    assert flags.get_z3_leaf_modules(model) == []
    assert flags.set_z3_leaf_modules(model, [Inner]) == [model[0], model[1][0]]
    assert flags.get_z3_leaf_modules(model) == [model[0], model[1][0]]
    assert flags.z3_leaf_module(model[0])
    assert not flags.z3_leaf_module(model)
    assert flags.unset_z3_leaf_modules(model, ["Inner"]) == [model[0], model[1][0]]
    assert flags.set_z3_leaf_modules_by_name(model, ["1", "7"], raise_if_not_found=False) == ([model[1]], ["7"])
    assert flags.set_z3_leaf_modules_by_suffix(model, [".0"]) == ([model[1][0]], [])
    for call in (
        lambda: flags.set_z3_leaf_modules(model, [nn.Conv2d]),
        lambda: flags.set_z3_leaf_modules_by_name(model, ["7"]),
    ):
        with pytest.raises(ValueError, match="no such"):
            call()
    with pytest.raises(TypeError, match="classes"):
        flags.set_z3_leaf_modules(model, [model[0]])


LEAVES = [
    ({}, []),
    ({"classes": ["Outer", "Absent"]}, ["", "my_experts"]),
    ({"classes": [f"{__name__}.Inner"]}, ["gate", "my_experts.0", "my_experts.1"]),
    ({"names": ["my_experts"]}, ["my_experts"]),
    ({"name_suffixes": ["experts"]}, ["my_experts"]),
]


class Outer(nn.Sequential):
    pass


@pytest.mark.parametrize(("asked", "expected"), LEAVES)
def test_a_configuration_flags_its_leaves(asked: dict[str, list[str]], expected: list[str]) -> None:
    model = Outer()
    model.add_module("gate", Inner(4, 4))
    model.add_module("my_experts", Outer(Inner(4, 4), Inner(4, 4)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "leaf_module": asked}
    engine = deepspeed.initialize(model=model, config={"train_batch_size": 1, "zero_optimization": zero})[0]
    assert [path for path, module in model.named_modules() if deepspeed.utils.z3_leaf_module(module)] == expected
    a, b = (unit_of(engine.module.my_experts[i].weight) for i in range(2))
    assert (a is b) == ("my_experts" in expected)


def test_a_configuration_that_finds_no_leaf() -> None:
    asked = {"classes": ["Absent"], "names": ["0", "experts"], "name_suffixes": ["x"]}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "leaf_module": asked}}
    with pytest.warns(ConfigWarning) as told:
        deepspeed.initialize(model=nn.Sequential(Inner(4, 4)), config=config)
    assert [str(one.message).partition(": ")[0] for one in told] == [
        "zero_optimization.leaf_module.classes = ['Absent']",
        "zero_optimization.leaf_module.names = ['experts']",
        "zero_optimization.leaf_module.name_suffixes = ['x']",
    ]
