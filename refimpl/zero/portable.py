"""A stage's weights and optimizer state by the parameter's name, out of and into whatever buckets this run has.

A rank's flat shards mean something only beside the shards of the same run: where they are cut depends on the stage, the
world size and the bucket size. By name, and with the place of each piece in its parameter, they belong to none of them.
`parts` says what this rank has to write: every element of the model is in exactly one rank's parts, also where all
ranks hold it. `restore` asks for what this rank holds here, piece by piece, straight into the memory where it stays.
DeepSpeed: deepspeed/checkpoint/universal_checkpoint.py and ds_to_universal.py.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from refimpl.checkpoint.place import Place
from refimpl.checkpoint.tensors import Later
from refimpl.offload.blocks import Buffer
from refimpl.offload.homes import is_here
from refimpl.zero.flat import Bucket, round_up
from refimpl.zero.optimizer.counted import clear_states
from refimpl.zero.parameter import DATA

if TYPE_CHECKING:
    from refimpl.zero.stage import Stage


@dataclass(frozen=True)
class Cut:
    """Stands for a state that has an element for each of the parameter's, such as exp_avg: it is read in pieces."""

    dtype: torch.dtype


class Source(Protocol):
    """Where `restore` reads."""

    def fill(self, key: str, name: str, begin: int, out: Tensor) -> None:
        """Elements from `begin` on of a parameter's "weight", or of its state `key`, into out [n], in out's dtype."""

    def state(self, name: str) -> Mapping[str, Any]:
        """A parameter's optimizer state: `Cut`, or the value itself, in memory of its own."""


@dataclass(frozen=True)
class Part:
    """What this rank writes of a parameter: elements of it, laid out flat, and of its state what is cut like it.

    rest: what is not cut (a count of steps), on the rank that has the first element.
    """

    name: str
    place: Place
    weight: Tensor | Later
    state: Mapping[str, Tensor | Later]
    rest: dict[str, Any]


def place_of(stage: "Stage", p: nn.Parameter) -> Place:
    """Where p lies; a parameter that is in no flat buffer has one of its own."""
    bucket, ranks = stage.home(p), stage.experts.get(p, stage.group).size
    at, of = (0, round_up(max(1, p.numel()), ranks)) if bucket is None else (bucket.offset[p], bucket.padded)
    return Place(tuple(p.shape), str(p.dtype).removeprefix("torch."), at, of, stage.group_of.get(p), p.requires_grad)


def parts(stage: "Stage") -> Iterator[Part]:
    """This rank's parts of all parameters: views where they are in memory, `Later` where they rest on a disk.

    None of what a rank beyond it saves. Bucket by bucket: what rests on a disk is read once, neighbours together.
    """
    beyond, across = stage.update.beyond, stage.update.across
    if across is not None and across.rank > 0:
        return
    at = {p: i for i, p in enumerate(p for bucket in stage.buckets for p in bucket.params)}
    for p, name in sorted(stage.names.items(), key=lambda item: at.get(item[0], len(at))):
        if beyond is not None and beyond.counts_none_of(p):
            continue
        bucket, place = stage.home(p), place_of(stage, p)
        ranks = stage.experts.get(p, stage.group)
        begin, end = place.held(ranks.rank, ranks.size)
        if bucket is None:
            yield Part(name, place, DATA.__get__(p).reshape(-1)[begin:end], {}, {})
            continue
        flat = seen(stage, bucket)
        here = place.at - bucket.first_of(flat.numel())
        low, high = here + begin, here + end
        state, rest = stage.update.state_at(bucket, low, high) if begin < end else ({}, {})
        weight = state.pop("") if "" in state else piece(bucket, flat, low, high)
        yield Part(name, place, weight, state, rest if begin == 0 else {})


def seen(stage: "Stage", bucket: Bucket) -> Tensor:
    """The most exact weights of a bucket that this rank has; where they rest on a disk their shape: see `away`."""
    master = stage.update.masters.get(bucket)
    resting = bucket.mine if master is None and bucket.shelf is not None else master
    return stage.weights(bucket) if resting is None or is_here(resting) else resting


def piece(bucket: Bucket, flat: Tensor, low: int, high: int) -> Tensor | Later:
    """Elements low to high of flat; of a shard that rests on a disk and is not trained: `Later`, if there are any."""
    if is_here(flat):
        return flat[low:high]
    return flat.new_empty(0) if low == high else Later(flat.dtype, (high - low,), lambda: bucket.now()[low:high])


@torch.no_grad()
def restore(stage: "Stage", source: Source, names: Iterable[str], optimizer: bool, apart: Iterable[str] = ()) -> None:
    """These parameters' weights from `source`, and with `optimizer` their state; `apart`: see `Slices`.

    This rank's alone, and no collective, so that each may fail by itself: `stage.gather()` brings them to the others.
    With `optimizer`, a parameter that is not among `names` keeps its weights and begins without a state.
    """
    wanted = set(names)
    restore_weights(stage, source, wanted)
    if optimizer and stage.update.slices.optimizer is not None:
        restore_optimizer(stage, source, wanted, apart)


def restore_weights(stage: "Stage", source: Source, wanted: Container[str]) -> None:
    """The part of `restore` that every load wants."""
    stage.free_gathered()  # ahead, with the old weights
    members: dict[Bucket, list[nn.Parameter]] = {}
    for p, name in stage.names.items():
        bucket = stage.home(p)
        if bucket is not None:
            members.setdefault(bucket, []).append(p)
        elif name in wanted:
            flat = DATA.__get__(p).reshape(-1)
            source.fill("weight", name, 0, flat)
            DATA.__get__(p).copy_(flat.view(p.shape))  # flat may be a copy
    for bucket, those in members.items():
        flat = stage.weights(bucket)  # of a disk: a copy, one at a time
        for p in [p for p in those if stage.names[p] in wanted]:
            here = place_of(stage, p).at - bucket.first_of(flat.numel())
            low, high = max(here, 0), min(here + p.numel(), flat.numel())
            if low < high:
                source.fill("weight", stage.names[p], low - here, flat[low:high])
        stage.put_weights(bucket, flat)


@torch.no_grad()
def restore_optimizer(stage: "Stage", source: Source, wanted: Container[str], apart: Iterable[str] = ()) -> None:
    """The optimizer's state alone, in the place of all that it had."""
    slices = stage.update.slices
    clear_states(stage.optimizer)
    slices.apart = {p for p, name in stage.names.items() if name in set(apart)}
    for bucket in sorted(slices.of, key=lambda bucket: bucket.group_index):  # as a step makes them
        restore_states(stage, bucket, source, wanted)
        stage.update.keep_state(bucket)
    stage.update.replaced()


def restore_states(stage: "Stage", bucket: Bucket, source: Source, wanted: Container[str]) -> None:
    """The optimizer's state of a bucket's slices, which are cut where parameters have different histories."""
    slices, names = stage.update.slices, stage.names
    assert slices.optimizer is not None
    spans = {p: slices.span(bucket, p) for p in bucket.params}
    spans = {p: span for p, span in sorted(spans.items(), key=lambda item: item[1]) if span[0] < span[1]}
    history = {p: source.state(names[p]) if names[p] in wanted else {} for p in spans}
    for p in slices.apart.intersection(spans):
        slices.set_apart(bucket, p)
    for before, p in pairwise(spans) if slices.kind.elementwise else ():
        if not same(history[before], history[p]):
            slices.cut(bucket, spans[p][0])
    first = bucket.first_of(slices.length[bucket])
    for s in slices.of[bucket]:
        members = [p for p, (start, end) in spans.items() if start < s.end and s.start < end]
        like = members[0] if members else bucket.params[-1]  # a slice of nothing but padding has a state too
        saved = source.state(names[like]) if names[like] in wanted else {}
        if not saved:
            continue
        options = slices.optimizer.param_groups[bucket.group_index]
        slices.optimizer.state[s.param] = state = fresh_state(saved, s.param, options, stage.update.is_away())
        for key in [key for key, value in saved.items() if isinstance(value, Cut)]:
            for p in members:
                low, high = max(spans[p][0], s.start), min(spans[p][1], s.end)
                out = state[key].view(-1)[low - s.start : high - s.start]
                source.fill(key, names[p], first + low - bucket.offset[p], out)


def fresh_state(saved: Mapping[str, Any], like: Tensor, options: Mapping[str, Any], passing: bool) -> dict[str, Any]:
    """The state of a slice: what is not cut, and room for what is to be read; `passing`: and then put elsewhere.

    Where torch's `load_state_dict` would have it: with the slice, but a count of steps at the host unless a kernel of
    the device counts.
    """
    by_kernel = options.get("fused") or options.get("capturable")
    state = {}
    for key, value in saved.items():
        if isinstance(value, Cut):
            state[key] = room(like, value.dtype, passing)
        else:
            stays = key == "step" and not by_kernel
            state[key] = value if stays else tree_map_only(Tensor, lambda t: t.to(like.device), value)
    return state


def room(like: Tensor, dtype: torch.dtype, passing: bool) -> Tensor:
    """Zeros in like's shape; what is passing in pages of its own, which the system has back at once.

    malloc would keep it: small things that stay are put into it, and the next bucket's state no longer fits.
    """
    if not passing or like.device.type != "cpu":
        return torch.zeros(like.shape, dtype=dtype, device=like.device)
    pages = Buffer(like.numel() * dtype.itemsize).bytes.untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(pages, 0, like.shape)  # type: ignore[call-overload, no-any-return]


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states differ in nothing but their elements."""
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) and isinstance(b[k], Tensor) else bool(a[k] == b[k])
        for k in a
    )
