"""Dropout in a rehearsal: nothing is dropped, and what would have been is written down.

Ranks whose tensors are parts cannot draw what one process draws for the whole. What can be checked is who draws: on a
tensor that is whole all ranks must drop the same elements, or their copies drift apart unnoticed; on a part each rank
draws for itself, or, where parts are not equally large, the ranks' common stream of numbers would part too. So dropout
must be `Inside`, between a column and its row layer, exactly where its tensor is a part. See `draws.py`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

KINDS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)


class Inside:
    """In place of `Draws`: only says where it is."""

    inside = False

    def enter(self) -> None:
        self.inside = True

    def leave(self) -> None:
        self.inside = False


class NoDropout(TorchFunctionMode):
    """Within it dropout, also that of attention, drops nothing. `log`: (shape, whether inside) of what would have."""

    def __init__(self, where: Inside | None = None) -> None:
        super().__init__()
        self.where = where or Inside()
        self.log: list[tuple[tuple[int, ...], bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in KINDS:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | {"train": True} | kwargs
            self.note(given["input"], given.get("p", 0.5) if given.get("training", given["train"]) else 0.0)
            return given["input"]
        if func is F.scaled_dot_product_attention:
            self.note(args[0] if args else kwargs["query"], args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
            args = (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:])
            kwargs.update({"dropout_p": 0.0} if len(args) < 5 else {})
        if func == torch.Tensor.requires_grad.__set__ and args[0].requires_grad:  # type: ignore[attr-defined]
            return None  # of what is made of an input: it has one here, for a rehearsal's inputs have (wav2vec 2.0)
        return func(*args, **kwargs)

    def note(self, x: Any, p: float) -> None:
        if p > 0:
            self.log.append((tuple(x.shape), self.where.inside))


def drawn_wrong(part: NoDropout, whole: NoDropout) -> str | None:
    """What is wrong with where a part of a model draws, if anything."""
    if len(part.log) != len(whole.log):
        return f"it has {len(part.log)} dropouts, whole it has {len(whole.log)}"
    for (shape, inside), (right, _) in zip(part.log, whole.log, strict=True):
        if inside == (shape == right):
            here = "between a column and a row layer" if inside else "outside of columns and rows"
            return f"its dropout of {list(shape)}, whole {list(right)}, stands {here}: ranks would draw wrong numbers"
    return None
