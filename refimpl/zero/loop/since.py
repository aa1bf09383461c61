"""What has become of a model since its stage was built, and would be trained by nobody: told at a step, or a save."""

import warnings
from collections.abc import Mapping
from typing import NoReturn

from torch import nn

from refimpl.checkpoint.errors import CheckpointError
from refimpl.comm.board import stacklevel
from refimpl.zero.gradients import Gradients
from refimpl.zero.parameter import stage_of

COMPLETE = "complete the model before `initialize` (or the stage), or destroy() the engine and make another"


def refuse_replaced(model: nn.Module, names: dict[nn.Parameter, str], gradients: Gradients) -> None:
    """A parameter object that was put in another's place is trained by nobody."""
    if len(gradients.used) == len(gradients.bucket_of):
        return
    here = set(model.parameters())
    gone = [names[p] for p in gradients.bucket_of if p not in gradients.used and p not in here]
    if gone:
        raise RuntimeError(
            f"{', '.join(gone)}: replaced in the model since the stage was built, so the new tensor is not trained. "
            "Copy values in place (p.copy_ under torch.no_grad), or build the stage after the change"
        )


def added(model: nn.Module, names: Mapping[nn.Parameter, str]) -> dict[str, nn.Parameter]:
    """What came into the model behind its stage."""
    return {name: p for name, p in model.named_parameters() if p not in names}


def added_and_used(model: nn.Module, names: Mapping[nn.Parameter, str]) -> str:
    """What was added and has a gradient, which nobody will apply: in words, or ""."""
    used = [name for name, p in added(model, names).items() if stage_of(p) is None and p.grad is not None]
    return (
        f"{', '.join(used)}: added to the model since the stage was built, so not trained: {COMPLETE}" if used else ""
    )


def warn_of_added(model: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """Nobody trains it, as in torch, whose optimizer does not know it. Without a gradient it is no news."""
    if words := added_and_used(model, names):
        warnings.warn(words, stacklevel=stacklevel())


def refuse_nothing(model: nn.Module, names: Mapping[nn.Parameter, str]) -> NoReturn:
    """RuntimeError: there are no gradients."""
    words = added_and_used(model, names)
    raise RuntimeError(
        f"step(): there are no gradients but of {words}" if words
        else "step() with no backward() since the last step() or zero_grad(): there are no gradients to apply"
    )  # fmt: skip


def warn_of_nothing(left_alone: set[nn.Parameter], gradients: Gradients, stage: str) -> None:
    """No rank has used a parameter since the last step."""
    if gradients.bucket_of and left_alone.issuperset(gradients.bucket_of):
        warnings.warn(
            f"{stage}: step() has nothing to update: the loss of no rank depends on a parameter of its model. Is it of "
            "another model or engine, detached, or was engine.module replaced?",
            stacklevel=stacklevel(),
        )


def refuse_added(model: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """CheckpointError: a checkpoint has no place for it."""
    if new := added(model, names):
        raise CheckpointError(f"{', '.join(new)}: added to the model since the stage was built: {COMPLETE}")
