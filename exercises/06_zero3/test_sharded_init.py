"""Grades chapter 06's construction: layers are cut as soon as they are built."""

from collections.abc import Iterable

import torch
from torch import nn

from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, storage_bytes
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup


class Pair(nn.Module):
    """Has parameters through its layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3, bias=False)
        self.second.requires_grad_(False)  # frozen ones take as much memory


class Plain(nn.Linear):
    """Has the constructor of the class that it is derived from."""


class Scaled(nn.Linear):
    """Adds to what the class that it is derived from has made."""

    def __init__(self) -> None:
        super().__init__(3, 5)
        self.scale = nn.Parameter(torch.full((5,), 2.0))


class Large(nn.Module):
    """Looks, after each layer that it makes, at how much is whole; ends in an exception if told to."""

    def __init__(self, seen: list[int], fail: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(5):
            layer = nn.Linear(9, out_features=11, bias=False) if i % 2 else nn.Embedding(11, 9, dtype=torch.bfloat16)
            self.layers.append(layer)
            seen.append(storage_bytes(self.parameters()))
        if fail:
            raise ValueError("this constructor fails on purpose")


def looked_at(answer: Answer) -> None:
    """What would end the process when memory that is gone is read, or in an index, becomes a sentence."""
    shard = answer.ShardedParams

    def once(params: Iterable[nn.Parameter], *args: object) -> object:
        held = list(params)
        early = "a module is sharded that has no parameters: call its constructor first; those of its layers count too"
        require(held, early)
        twice = "a module is sharded twice: where one constructor calls another, only the outer one may shard"
        require(all(p.untyped_storage().nbytes() for p in held), twice)
        return shard(held, *args)

    answer.ShardedParams = once  # type: ignore[attr-defined]


@on_ranks(2, 3, 4)
def test_sharded_init(answer: Answer, group: WatchedGroup) -> None:
    looked_at(answer)
    originals, names = (nn.Linear.__init__, nn.Embedding.__init__), {*vars(nn.Linear), *vars(nn.Embedding)}
    seen: list[int] = []
    kept = Kept(group)
    for fail in (False, True):
        case("a model is built, with other random numbers on every rank" if not fail else "its constructor fails")
        torch.manual_seed(group.rank)
        seen.clear()
        try:
            with answer.sharded_init(group.fresh(), nn.Linear, nn.Embedding) as made:
                built = Large(seen, fail)
        except ValueError:
            require(fail, "an exception of the constructor is raised, where there was none")
        else:
            require(not fail, "an exception inside the `with` block is swallowed")
            model, units = built, made
        restored = (nn.Linear.__init__, nn.Embedding.__init__) == originals
        nn.Linear.__init__, nn.Embedding.__init__ = originals  # type: ignore[method-assign]
        more = sorted({*vars(nn.Linear), *vars(nn.Embedding)} - names)
        require(not more, f"the classes have new attributes afterwards: {', '.join(more)}")
        require(restored, "the classes' constructors are not what they were before: put them back in `finally`")
    evidence = f"bytes of whole parameters after each layer: {', '.join(map(str, seen))}"
    require(
        max(seen) == 0, "layers stay whole while the next are built: shard each when its constructor returns", evidence
    )
    case("what was built")
    del built, made
    shards = sum(storage_bytes([u.mine]) for u in units)
    kept.judge(shards, "sharded_init", "the units' shards alone may stay; what else holds the layers' first values?")
    torch.manual_seed(0)
    plain = Large([])
    require(len(units) == 5, f"{len(units)} units were yielded, expected one for each of 5 layers")
    for unit in units:
        unit.gather()
    kinds, asked = ({n: (tuple(p.shape), p.dtype) for n, p in m.named_parameters()} for m in (model, plain))
    lost = "the layers are not built as they were asked for: pass keyword arguments (bias=False, dtype=...) on too"
    require(kinds == asked, lost, f"  built  {kinds}", f"  asked  {asked}")
    for (name, p), truth in zip(model.named_parameters(), plain.parameters(), strict=True):
        equal(p.detach(), truth.detach(), f"{name} after gather()")

    case("a class whose parameters are those of its layers")
    with answer.sharded_init(group.fresh(), Pair) as made:
        pair = Pair()
    whole = [name for name, p in pair.named_parameters() if p.untyped_storage().nbytes()]
    left = f"{', '.join(whole)} stay whole: shard all that is inside, as one unit"
    require(not whole, left)
    require(len(made) == 1, f"{len(made)} units for one module with two layers: shard all that is inside, as one unit")
    derived(answer, group)


def derived(answer: Answer, group: WatchedGroup) -> None:
    case("nn.Linear is named, and a class without a constructor of its own is derived from it")
    with answer.sharded_init(group.fresh(), nn.Linear) as made:
        Plain(3, 5)
    require(len(made) == 1, f"{len(made)} units for a module of a derived class, expected 1: it is an nn.Linear too")
    case("both are named")
    with answer.sharded_init(group.fresh(), nn.Linear, Plain) as made:
        Plain(3, 5)
    require(len(made) == 1, f"{len(made)} units for one module, expected 1: one constructor calls the other")
    gained = "Plain has a constructor of its own now: it had inherited one, so delete yours"
    require("__init__" not in vars(Plain), gained)
    case("nn.Linear is named, and a derived class that calls its constructor in its own: the outer one alone shards")
    with answer.sharded_init(group.fresh(), nn.Linear, Scaled) as made:
        scaled = Scaled()
    early = "the constructor of nn.Linear shards it, and what the derived class adds behind that stays whole"
    require(not scaled.scale.untyped_storage().nbytes(), early)
    require(len(made) == 1, f"{len(made)} units for one module, expected 1: the derived class's constructor shards it")
