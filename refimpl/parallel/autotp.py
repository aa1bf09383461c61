"""Tensor parallelism for a model never seen before: which layers to cut, and how, is found by running it once.

    report = autotp(model, group, example)        afterwards the model is trained as before
    print(report)

    model.embed_tokens                  1 x  vocabulary  by tokens
    model.layers.*.self_attn.q_proj     2 x  columns     8 units
    model.layers.*.self_attn.o_proj     2 x  rows        8 units
    visual.patches.weight               1 x  whole       of a Conv2d, which is no plain linear layer or embedding

    1. trace.py       which layers feed which; which end a residual branch: those are cut by rows
    2. units.py       into how many independent pieces what lies between columns and rows falls: heads, groups,
                      features; with fewer groups than ranks, keys and values of a group are on several ranks
    3. regions.py     rows and the columns before them; embedding and head by the vocabulary, tied as they were
    4. sizes.py       which numbers of the modules around (`num_heads`, ...) must be a rank's part of themselves
    5. rehearsal.py   each cut tried on a twin in fp64, forward and backward, against the whole model: what differs is
                      not cut, and the report says why

A proposal may be wrong; a cut that computes something else is not made. The proof is by example: the example must call
what training calls, with two tokens or more. What it does not call stays whole. A model that takes an `attention_mask`
is rehearsed with one too, in which a token is masked: transformers' attention goes another way there, and repeats keys
by a number that it does not read without a mask.

Memory, for the time of the call: 24 bytes a parameter on every rank's host, for a twin in fp64 and two sets of its
gradients. Sent: rank 0's weights, once; a few times for each kind of layer what the example's activations weigh. Then
memory and traffic are as in `tensor.py` and `door.py`. DeepSpeed: deepspeed/module_inject/auto_tp.py, which goes by the
names of layers and of models.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.first import take_first
from refimpl.comm.group import Group
from refimpl.parallel.auto import rehearsal
from refimpl.parallel.auto.cut import Cut
from refimpl.parallel.auto.guess import guessed, works
from refimpl.parallel.auto.guess import words as words_of
from refimpl.parallel.auto.regions import Region, find_regions, words
from refimpl.parallel.auto.report import Report, describe, reasons
from refimpl.parallel.auto.stage import Stage, alike_regions
from refimpl.parallel.auto.trace import Call, plain_layers, tensors, trace
from refimpl.parallel.conjugates import TAG
from refimpl.parallel.draws import Draws
from refimpl.parallel.styles import Columns, Plan, Rows, Style, Vocabulary
from refimpl.parallel.summed import sum_gradients
from refimpl.parallel.swap import match, sum_copies


def autotp(model: nn.Module, group: Group, example: Any = None, *, plan: Plan | None = None) -> Report:
    """Cut `model` in place for the ranks of `group`; a collective. Its outputs and gradients stay the whole model's.

    `example`: what the model is called with: a tensor, a tuple of arguments or a dictionary of keyword arguments; the
    same on all ranks, small, of two tokens or more. Default: the model's own `dummy_inputs`, if it has them, as
    transformers' models do; else a call that works, which is guessed and logged (auto/guess.py). `plan`: as of
    `parallelize`, to choose the layers oneself; units and numbers to divide are found all the same, and it is
    rehearsed. Rank 0's weights are taken, and its random numbers for dropout on whole tensors; for parts each rank has
    its own, made of rank 0's seed, see `draws.py`. The loss needs no change: logits are gathered. Call it before the
    optimizer is made.

    ValueError without an example where these fail, or every guess, if nothing can be cut, and if a plan cannot be kept,
    with the reasons. RuntimeError if cuts that were each right are not together. The model's layers are then what they
    were. A plan of no layers needs no example, nor does a single rank: each keeps the whole model.
    """
    if group.size == 1:
        return describe(Cut(), dict.fromkeys(plain_layers(model), "one rank"))
    take_first((*model.parameters(), *model.buffers()), group, TAG)
    if plan is not None and not plan:
        common_numbers(model, group)
        return describe(Cut(), dict.fromkeys(plain_layers(model), "the plan has no layer"))
    # The twin is at the host. Only where it must: in such a block torch's own layers do not take their fast way.
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        cut, why = found(model, group, example, plan)
    if not cut.styles:
        told = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        raise ValueError(f"{type(model).__name__} cannot be cut for {group.size} ranks: {told}")
    report = describe(cut, why)
    cut.apply(model, group, common_numbers(model, group))
    sum_copies(model)
    for name in cut.summed:
        prefix, _, key = name.rpartition(".")
        sum_gradients(model.get_submodule(prefix), [key], group)
    return report


def found(model: nn.Module, group: Group, example: Any, plan: Plan | None) -> tuple[Cut, dict[str, str]]:
    """What can be cut, and why the rest is not."""
    known = known_example(model, example, group)
    try:
        stage = set_up(model, known, group)
    except Exception as error:
        if example is not None or works(rehearsal.make_twin(model, torch.float32), known, called):
            raise
        raise ValueError(  # transformers' models of images have ids of tokens there
            f"{type(model).__name__} cannot be called with its dummy_inputs ({type(error).__name__}: {error}): give "
            "autotp an example of what it is called with, initialize its training_data, or its class other dummy_inputs"
        ) from error
    regions, why = proposed(stage.twin, partial(called, example=known), group.size)
    if plan is not None:
        regions = planned(stage.twin, plan, regions)
    return rehearsed(stage, regions, why, strict=plan is not None), why


def common_numbers(model: nn.Module, group: Group) -> Draws:
    """From here on all ranks draw what rank 0 would have drawn, but where tensors are parts their own."""
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    seed, state = group.all_gather_object((torch.initial_seed(), state))[0]
    if cuda:
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
    return Draws(seed, group.rank, device)


def rehearsed(stage: Stage, regions: list[Region], why: dict[str, str], strict: bool) -> Cut:
    """All regions whose cut passes, together; `why` is told of the others, or with `strict` ValueError raised."""
    cut = Cut()
    for alike in alike_regions(regions):
        tried = stage.best(alike)
        if isinstance(tried, Cut):
            cut.join(tried)
            continue
        why |= {name: tried for region in alike for name in region.styles}
        if strict:
            raise ValueError(f"plan: {', '.join(alike[0].styles)} cannot be cut so: {tried}")
    together = stage.rehearse(cut)
    if isinstance(together, str):
        raise RuntimeError(f"cuts that are right one by one are not together: {together}; give it a plan")
    cut.summed = together
    return cut


def set_up(model: nn.Module, example: Any, group: Group) -> Stage:
    """A twin in fp64, or in fp32 if it has operations that know no fp64, or put its least number into fp32 (XGLM)."""
    try:
        return with_and_without_mask(rehearsal.make_twin(model), example, group)
    except RuntimeError as error:
        if "Double" not in str(error) and "without overflow" not in str(error):
            raise
    return with_and_without_mask(rehearsal.make_twin(model, torch.float32), example, group)


def with_and_without_mask(twin: nn.Module, example: Any, group: Group) -> Stage:
    """Where the example is rehearsed, and the same with a token masked if the twin can be called so."""
    examples = [example]
    if (masked := masked_example(twin, example)) is not None:
        with rehearsal.seeded(None), torch.no_grad(), suppress(Exception):  # its mask may be of another kind
            if all(y.isfinite().all() for y in tensors(called(twin, masked))):  # else nothing could be compared
                examples.append(masked)
    return Stage(twin, lambda twin: [called(twin, one) for one in examples], group)


def masked_example(model: nn.Module, example: Any) -> dict[str, Any] | None:
    """The example with its last token masked; None if it has a mask already, or is not of tokens, or none is taken."""
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or "attention_mask" not in signature(model.forward).parameters:
        return None
    mask = example.get("attention_mask", torch.ones_like(ids)).clone()
    if mask.shape != ids.shape or not mask.all():
        return None
    mask[-1, -1] = 0
    return {**example, "attention_mask": mask}


def known_example(model: nn.Module, example: Any, group: Group) -> Any:
    """The one that is given, the model's own, or a guess. ValueError if there is none."""
    example = getattr(model, "dummy_inputs", None) if example is None else example
    if example is not None:
        return example
    name = type(model).__name__
    if (guess := guessed(model, called)) is None:
        raise ValueError(
            f"{name} has no dummy_inputs, and no guess at its arguments works: give autotp an example of what it is "
            "called with, initialize its training_data, or the model that attribute"
        )
    if group.rank == 0:
        logging.getLogger("refimpl").warning(
            "autotp: %s has no example: rehearsed with %s, a guess; what training calls beyond it stays untried",
            name, words_of(guess),
        )  # fmt: skip
    return guess


def called(twin: nn.Module, example: Any) -> Any:
    """What a twin of the model says to the example, floating-point tensors in the twin's dtype."""
    given = to_twin(example, next(twin.parameters()).dtype)
    if isinstance(given, Mapping):
        return twin(**given)
    return twin(*given) if isinstance(given, tuple | list) else twin(given)


def to_twin(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        return x.to(dtype, copy=True).requires_grad_() if x.is_floating_point() else x
    if isinstance(x, Mapping):
        return {key: to_twin(value, dtype) for key, value in x.items()}
    return type(x)(to_twin(value, dtype) for value in x) if type(x) in (tuple, list) else x


def proposed(twin: nn.Module, call: Call, ranks: int) -> tuple[list[Region], dict[str, str]]:
    """Regions that may be cut, the vocabulary last; and of every layer why it stays whole if it is in none."""
    with rehearsal.seeded(None):
        found = trace(twin, call)
    residual = found.residual()
    regions, why = find_regions(found, residual, ranks)
    vocabulary = words(twin, found, residual, regions)
    return [*regions, *([vocabulary] if vocabulary else [])], reasons(twin, found) | why


def planned(twin: nn.Module, plan: Plan, regions: list[Region]) -> list[Region]:
    """The plan's layers, by regions. What it does not say, how many units or blocks, is taken from what was found."""
    styles = match(plan, [name for name, _ in twin.named_modules() if name])
    weights = {twin.get_submodule(name).weight for name in styles}
    for name, layer in plain_layers(twin).items():
        if layer.weight in weights and name not in styles:  # tied
            styles[name] = Vocabulary() if isinstance(layer, nn.Embedding) else Columns(gathered=True)
    chosen = list[Region]()
    for region in regions:
        mine = {name: completed(styles.pop(name), found) for name, found in region.styles.items() if name in styles}
        if mine:
            chosen.append(replace(region, styles=mine))
    return [*chosen, *([Region(styles)] if styles else [])]


def completed(style: Style, found: Style) -> Style:
    """A style without units, with those that were found, and the blocks in which they lie."""
    if isinstance(style, Rows) and isinstance(found, Rows) and style.units is None:
        return found
    if isinstance(style, Columns) and isinstance(found, Columns) and style.units is None:
        known = found.blocks if isinstance(found.blocks, tuple) else (found.blocks,)
        if style.blocks in (1, len(known), known):
            return replace(found, gathered=style.gathered)
    return style
