"""What the planner says, counted where it runs: every byte kept and sent, dense or with mixtures of experts."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kept import counted as kept_for_backward
from torch import Tensor
from worlds import run

from refimpl.comm.group import Group
from refimpl.engine.initialize import initialize
from refimpl.measure.memory import MemoryMeter
from refimpl.model.gates import Routing
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.moe import mixtures
from refimpl.parallel.expert.marks import is_expert
from refimpl.parallel.styles import gpt_plan
from refimpl.parallel.swap import parallelize
from refimpl.plan import formulas
from refimpl.plan.kept import activations
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import Experts, Shape, of_gpt
from refimpl.plan.stages import experts_of, parameters_of
from refimpl.plan.traffic import by_axis, traffic
from refimpl.zero.stage import Stage

COUNTED = GPTConfig(vocab=16, context=8, width=64, layers=4, heads=4)
LARGE = replace(COUNTED, vocab=2048, layers=5)  # as much as two and a half blocks
UNEVEN = GPTConfig(vocab=17, context=12, width=240, layers=3, heads=5)  # 2 and 3 divide neither heads nor vocabulary


def mixed(config: GPTConfig) -> Shape:
    """Of up to four layers the second and the fourth are mixtures, of GPT's MLPs, which have biases."""
    w = config.width
    return replace(of_gpt(config), experts=Experts(4, 2, 4 * w, biases=5 * w, dense=frozenset({0, 2})))


# ZeRO-3 keeps small parameters whole, and those that are needed again soon; here all are small.
LEFT = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def gpt(shape: Shape, recompute: bool) -> GPT:
    """What is computed again balances nothing."""
    plain = replace(shape, experts=None)
    config = next(config for config in (COUNTED, LARGE, UNEVEN) if of_gpt(config) == plain)
    if shape.experts is None:
        return GPT(config)
    routing = Routing(k=shape.experts.k)
    return mixtures(GPT(config), shape.experts.count, routing, every=2, balance=0 if recompute else 0.1)


def in_turn(logits: Tensor, scores: Tensor, routing: Routing, *_: object) -> Tensor:
    """Stands in for `gates.choose`: tokens go to all experts in turn, as the planner has it."""
    return torch.arange(len(logits) * routing.k).view(-1, routing.k) % logits.shape[1]


def layouts(stage: Stage) -> list[formulas.Layout]:
    """Of the dense parameters and of the experts'."""
    found: list[list[Any]] = [[], []]
    for bucket in stage.buckets:
        found[is_expert(bucket.params[0])].append(bucket)
    return [formulas.layout_of(SimpleNamespace(buckets=buckets)) for buckets in found]


@patch("refimpl.model.gates.choose", in_turn)
def counted(shape: Shape, mesh: Mesh, stage: int) -> tuple[dict[str, int], dict[str, int], list[formulas.Layout], int]:
    """Bytes sent by axis, kept by class (activations at the most, else before the update), layouts, pipeline stage."""
    config = {
        "train_micro_batch_size_per_gpu": mesh.micro, "gradient_accumulation_steps": mesh.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": stage} | LEFT,
        "pipeline": {"stages": mesh.pp, "activation_checkpoint_interval": int(mesh.recompute)},
        "tensor_parallel": {"autotp_size": mesh.tp}, "sequence_parallel_size": mesh.cp,
        "expert_parallel": {"enabled": mesh.ep > 1, "autoep_size": mesh.ep},
    }  # fmt: skip
    engine, *_ = initialize(model=gpt(shape, mesh.recompute), config=config)
    ids = torch.zeros(mesh.micro, shape.context, dtype=torch.int64)
    kept: dict[str, int] = {}
    engine.optimizer.register_step_pre_hook(lambda *_: kept.update(MemoryMeter(engine.stage.tensors).now()))
    for _ in range(2):
        engine.axes.world.ledger.reset()
        with kept_for_backward(lambda: chain.from_iterable(engine.stage.tensors().values())) as activations:
            engine.train_batch(iter([(ids, ids)] * mesh.micro_batches))
        assert activations.now == 0
    sent = by_axis(engine.axes.world.ledger.sent_bytes("tag"))
    kept["activations"] = activations.peak
    return sent, kept, layouts(engine.stage), engine.axes.pipeline.rank


runs = partial(Mesh, recompute=False, itemsize=4, sequence=False)  # in fp32, as a JSON asks for it


def name_of(value: object) -> str:
    sizes = ("dp", "pp", "cp", "tp", "ep")
    return "-".join(f"{n}{getattr(value, n)}" for n in sizes) if isinstance(value, Mesh) else ""


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        (runs(2, 2, 1, 8), 1), (runs(1, 2, 2, 4, zero="ddp"), 0), (runs(2, 1, 2, 4, zero="zero2"), 2),
        (runs(1, 4, 1, 4, 2, zero="ddp"), 0), (runs(1, 1, 2, 2, cp=2), 1), (runs(2, 1, 1, 4, cp=2), 1),
        (runs(1, 1, 4, 2, zero="ddp"), 0), (runs(2, 2, 2, 4), 1), (runs(3, 1, 1, 6, zero="zero3"), 3),
        (runs(1, 2, 2, 4, 2, zero="ddp", recompute=True), 0), (runs(1, 4, 1, 6, zero="ddp", recompute=True), 0),
        (runs(1, 3, 1, 6), 1),
    ],
    ids=name_of,
)  # fmt: skip
def test_every_byte_on_every_axis_and_in_every_class_is_counted(mesh: Mesh, stage: int) -> None:
    every_byte(of_gpt(COUNTED), mesh, stage)


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [(runs(1, 1, 2, 2), 1), (runs(1, 1, 3, 2), 1), (runs(1, 2, 2, 4, recompute=True), 1), (runs(2, 1, 2, 4, cp=2), 1)],
    ids=name_of,
)
def test_heads_that_do_not_divide_are_the_first_ranks(mesh: Mesh, stage: int) -> None:
    """It has most of them, and most of the vocabulary."""
    every_byte(of_gpt(UNEVEN), mesh, stage)


def test_a_large_vocabulary_takes_the_place_of_blocks() -> None:
    every_byte(of_gpt(LARGE), runs(1, 3, 1, 6), 1)
    every_byte(of_gpt(LARGE), runs(1, 2, 2, 4, zero="ddp"), 0)


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        (runs(1, 1, 1, 2, zero="ddp"), 0), (runs(2, 1, 1, 4, ep=2), 1), (runs(4, 1, 1, 8, zero="zero3", ep=2), 3),
        (runs(4, 1, 1, 8, zero="zero2"), 2), (runs(2, 2, 1, 8, ep=2), 1), (runs(2, 1, 2, 4, ep=2), 1),
        (runs(1, 1, 2, 2, cp=2, ep=2), 1), (runs(2, 2, 2, 4, zero="ddp", ep=2), 0),
        (runs(2, 2, 1, 8, zero="ddp", recompute=True, ep=2), 0), (runs(1, 3, 1, 6, zero="ddp"), 0),
        (runs(2, 2, 2, 4, zero="ddp", recompute=True, ep=2), 0), (runs(1, 1, 2, 2), 1),  # experts whole, of all tokens
        (runs(2, 1, 2, 4, zero="zero3"), 3), (runs(1, 2, 2, 4, recompute=True), 1),
    ],
    ids=name_of,
)  # fmt: skip
def test_every_byte_of_mixtures_is_counted(mesh: Mesh, stage: int) -> None:
    every_byte(mixed(COUNTED), mesh, stage)


def test_every_byte_of_mixtures_beside_uneven_heads_is_counted() -> None:
    every_byte(mixed(UNEVEN), runs(1, 1, 3, 2, zero="ddp"), 0)


def every_byte(shape: Shape, mesh: Mesh, stage: int) -> None:
    """On all ranks; where parts are uneven on the first ones, which have most."""
    first = mesh.tp if shape.heads % mesh.tp else 1
    for sent, kept, found, place in run(counted, shape, mesh, stage, ranks=mesh.gpus)[::first]:
        expected = traffic(shape, mesh, place, *(layout.padding for layout in found))
        if mesh.recompute and place == 0:  # an interval of one layer: the pipeline runs its embeddings twice too
            once = 2 * mesh.tokens(shape) * shape.width * mesh.itemsize * (mesh.tp - 1) // mesh.tp
            expected["tensor"] += mesh.micro_batches * once
        assert sent.pop("control") < 1000
        assert sent == expected
        replicas, wanted = mesh.dp * mesh.cp, Counter[str]()
        for layout, elements, ranks in (
            (found[0], parameters_of(shape, mesh, place), replicas),
            (found[1], experts_of(shape, mesh, place), replicas // mesh.ep),
        ):
            planned = formulas.Layout(elements, layout.padding, layout.buckets)
            wanted.update(formulas.memory_bytes(mesh.zero, ranks, 4, planned))
        wanted["activations"] = activations(shape, mesh, place)
        assert {name: kept.get(name, 0) for name in wanted} == wanted


def under_sequence_parallelism(config: GPTConfig, mesh: Mesh) -> int:
    """What autograd keeps of the whole model, its tokens divided between the cut matrices."""
    model = GPT(config)
    parallelize(model, gpt_plan(config.heads, config.vocab), Group.world(), sequence=mesh.sequence)
    ids = torch.zeros(mesh.micro, config.context, dtype=torch.int64)
    with kept_for_backward(model.parameters) as kept:
        model(ids, ids).backward()
    return kept.peak


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_under_sequence_parallelism_are_counted(ranks: int, sequence: bool) -> None:
    mesh = Mesh(1, 1, ranks, 2, 2, "ddp", recompute=False, itemsize=4, sequence=sequence)
    expected = activations(of_gpt(COUNTED), mesh)
    assert run(under_sequence_parallelism, COUNTED, mesh, ranks=ranks) == [expected] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_parts_under_sequence_parallelism_are_counted(ranks: int) -> None:
    mesh = Mesh(1, 1, ranks, 2, 2, "ddp", recompute=False, itemsize=4)
    first, *_, last = run(under_sequence_parallelism, UNEVEN, mesh, ranks=ranks)
    assert first == activations(of_gpt(UNEVEN), mesh) > last
