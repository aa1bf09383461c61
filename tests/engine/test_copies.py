"""Copies on tensor ranks and pipeline stages stay the same to the bit; what would part them is refused by its key."""

import re
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from refimpl.comm.group import Group
from refimpl.deepspeed.pipe import PipelineModule, TiedLayerSpec
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.initialize import initialize
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.tensor import cuts

SHAPE = GPTConfig(vocab=19, context=8, width=20, layers=1, heads=2)
COMPRESSORS: list[dict[str, Any]] = [
    {"type": "randomk", "ratio": 0.3},
    {"type": "sign"},
    {"type": "powersgd", "least_ratio": 1.01, "rank": 1},
]
SENT_WHOLE = {
    "type": "powersgd",
    "rank": 1,
    "least_ratio": 10.0,
}  # wpe and a tied wte are sent whole, the others are not
PLUS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


def config(tensor: int = 1, stages: int = 1, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1, **(zero or {})},
        "tensor_parallel": {"autotp_size": tensor},
        "pipeline": {"stages": stages},
        **more,
    }


def gpt(tied: bool = True, frozen: str = "") -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**vars(SHAPE), "tied": tied}))
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or not name.startswith(frozen))
    return model


def said(settings: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What initialize says to each of these, with what is frozen in the model."""
    found = []
    for frozen, asked in settings:
        with pytest.raises(ConfigError) as error:
            initialize(model=gpt(frozen=frozen), config=asked)
        found.append(str(error.value))
    return found


def test_compressed_gradients_beside_copies_are_refused() -> None:
    asked = [("", config(*axes, gradient_compression=c)) for axes in ((2, 1), (1, 2)) for c in COMPRESSORS]
    for told in worlds.run(said, asked, ranks=4):
        by_tensor, by_stages = told[: len(COMPRESSORS)], told[len(COMPRESSORS) :]
        for text in by_tensor:
            assert re.match(r"gradient_compression: \S+ is on several 2 tensor ranks, .* would part: take it out", text)
        for text in by_stages:
            assert re.match(r"gradient_compression: \S+ is on several pipeline stages.*GPTConfig\(tied=False\)", text)


def test_units_with_copies_and_parts_are_refused() -> None:
    zero = [{"stage": 3, "stage3_param_persistence_threshold": 5, key: True} for key in PLUS]
    asked = [
        ("" if "nontrainable" not in key else "blocks", config(2, zero=z)) for key, z in zip(PLUS, zero, strict=True)
    ]
    for told in worlds.run(said, asked, ranks=4):
        for key, text in zip(PLUS, told, strict=True):
            assert text.startswith(f"zero_optimization.{key}: blocks.0.attention.out.bias is on several 2 tensor ranks")
            assert "set zero_optimization.stage3_param_persistence_threshold to 20 or more, or take the key" in text


def apart(settings: list[dict[str, Any]], tied: bool) -> list[tuple[int, list[str]]]:
    """For each configuration: how many copies there are, and which are not the same on all after three steps."""
    found = []
    for asked in settings:
        engine = initialize(model=gpt(tied), config=asked)[0]
        for step in range(3):
            draw = torch.Generator().manual_seed(10 * step + engine.axes.feed)
            ids = torch.randint(SHAPE.vocab, (2, 2, SHAPE.context + 1), generator=draw)
            engine.train_batch(iter([(x[:, :-1], x[:, 1:]) for x in ids]))
        mine = copies_of(engine)
        first, *others = engine.axes.model.all_gather_object(mine)
        found.append((len(mine), [n for n in first for other in others if not torch.equal(first[n], other[n])]))
    return found


def copies_of(engine: Any) -> dict[str, Tensor]:
    model, whole = engine.module, engine.stage.full_parameter
    if engine.axes.pipeline.size > 1:
        return {f"{i} {j}": p.detach() for i, (_, ps) in enumerate(model.shared) for j, p in enumerate(ps)}
    return {name: whole(name) for p, name in engine.stage.names.items() if p not in cuts(model)}


def test_what_is_not_refused_leaves_copies_alike() -> None:
    stage3 = {"stage": 3, "stage3_param_persistence_threshold": 200}
    tensor = [
        config(2, gradient_compression=SENT_WHOLE),
        *(config(2, zero={**stage3, key: True}) for key in PLUS[:2]),
    ]
    for results in worlds.run(apart, tensor, True, ranks=4):
        assert all(number > 5 and not parted for number, parted in results), results
    for tied, compression in ((True, SENT_WHOLE), (False, {"type": "int8"})):
        for results in worlds.run(apart, [config(1, 2, gradient_compression=compression)], tied, ranks=4):
            assert results == [(int(tied), [])]


def trained_unlike(kind: str) -> str:
    """What initialize says if the last rank alone freezes a parameter, or keeps it out of its optimizer."""
    last = Group.world().rank == Group.world().size - 1
    model: Any = gpt()
    if kind == "layers":
        layers = [TiedLayerSpec("one", nn.Linear, 4, 4), nn.Linear(4, 4), TiedLayerSpec("one", nn.Linear, 4, 4)]
        model = PipelineModule(layers, 2, loss_fn=mse_loss)
        if last:
            model.tied_modules["one"].bias.requires_grad_(False)
    elif last and kind != "optimizer":
        model.get_parameter("ln.bias" if kind == "tensor" else "wte.weight").requires_grad_(False)
    given = [p for name, p in model.named_parameters() if not (last and kind == "optimizer" and name == "ln.bias")]
    asked = config(2) if kind in ("tensor", "optimizer") else config(1, 2)
    with pytest.raises(ValueError, match="and they share it") as error:
        initialize(model=model, model_parameters=given, config=asked)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "ranks", "named"),
    [
        ("tensor", 4, "ln.bias"),
        ("optimizer", 2, "ln.bias"),
        ("gpt", 2, "wte.weight"),
        ("layers", 2, "tied_modules.one.bias"),
    ],
)
def test_frozen_on_one_of_the_ranks_that_share_a_layer(kind: str, ranks: int, named: str) -> None:
    """Data ranks hear of it in `refuse_different`: tests/zero/test_wrong_input.py."""
    first, last = ranks - 2, ranks - 1
    for text in worlds.run(trained_unlike, kind, ranks=ranks):
        assert text.startswith(
            f"parameter {named} is trained on rank {first}, frozen on rank {last}, and they share it"
        )
