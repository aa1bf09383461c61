"""A rank's part of the model in the terms of the whole one: names, and what of a parameter that others have too it is.

A checkpoint knows the whole model alone, so that it belongs to no layout. A pipeline's layers have the names they had
before they were dealt out, copies of a shared weight the name of the first, and a split parameter is a `Portion`.
"""

from typing import Any

from torch import nn

from refimpl.checkpoint.place import Portion
from refimpl.engine.cut import OTHERS_FLAGS
from refimpl.engine.experts import expert_parts
from refimpl.engine.state import TrainingState
from refimpl.parallel.tensor import cuts


def portions(engine: TrainingState) -> dict[nn.Parameter, tuple[Portion, tuple[int, ...]]]:
    """What of a split parameter this rank has, and the whole one's shape; its own shape where only the model knows."""
    found: dict[nn.Parameter, tuple[Portion, tuple[int, ...]]] = {}
    rank = engine.axes.tensor.rank
    for p in engine.stage.names if engine.axes.tensor.size > 1 else ():
        if any(getattr(p, flag, False) for flag in OTHERS_FLAGS):
            found[p] = Portion(None, ((rank, rank + 1),)), tuple(p.shape)
    for p, (split, dim, _) in cuts(engine.module).items():
        spans = tuple((span.start, span.stop) for span in split.spans(rank))
        found[p] = Portion(dim, spans), (*p.shape[:dim], split.whole, *p.shape[dim + 1 :])
    return found | expert_parts(engine.module, engine.stage.experts, engine.axes.replicas)


def portions_by_name(engine: TrainingState) -> dict[str, Portion]:
    return {engine.stage.names[p]: portion for p, (portion, _) in portions(engine).items()}


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all parts of a replica say of themselves, as what the whole says: see `contents.about_rank`.

    A name that several say is the same for all, unless they have parts of it, or a buffer each.
    """
    whole: dict[str, Any] = {"parameters": {}, "tied": {}, "buffers": {}, "order": [], "apart": [], "left_out": []}
    for part in parts:
        for name, place in part["parameters"].items():
            known = whole["parameters"].setdefault(name, place)
            if known is not place:
                known.setdefault("parts", []).extend(p for p in place.get("parts", []) if p not in known["parts"])
        for name, buffer in part["buffers"].items():
            known = whole["buffers"].setdefault(name, buffer)
            if known is not buffer:
                known["ranks"] = sorted({*known["ranks"], *buffer["ranks"]})
        whole["tied"] |= part["tied"]
        for key in ("order", "apart", "left_out"):
            whole[key] = list(dict.fromkeys([*whole[key], *part[key]]))
    return whole | {key: sorted(whole[key]) for key in ("apart", "left_out")}
