"""Whole fp32 parameters, gradients and optimizer states of a sharded model, read and written; and this rank's share.

`safe_get_full_*` and `safe_set_full_*` are collectives: call them on every rank, in the same order. `None` for a
parameter that is frozen, or that no engine trains. The `local` ones are this rank's fragment, one-dimensional, in every
stage. DeepSpeed: deepspeed/utils/tensor_fragment.py; ours: refimpl/zero/loop/access.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from refimpl.zero.loop.access import exact
from refimpl.zero.parameter import stage_of
from refimpl.zero.stage import Stage


@dataclass
class fragment_address:
    """A part of a flat buffer in DeepSpeed's checkpoints. Scripts name it to `torch.serialization.add_safe_globals`."""

    numel: int
    start: int


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The fp32 master of `param`, whole."""
    stage = trained_by(param)
    return None if stage is None else stage.full_parameter(param)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient of `param`, whole, fp32, averaged over ranks; None before backward.

    Between micro-batches it is the mean so far, in every stage (DeepSpeed's stage 1 gives this rank's own there).
    """
    if not param.requires_grad:
        return None
    stage = stage_of(param)
    return param.grad if stage is None else stage.full_gradient(param)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The state `optim_state_key` ("exp_avg", ...) of `param`, whole, fp32; None before the first step."""
    stage = trained_by(param)
    return None if stage is None else stage.full_state(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the fp32 master of `param`, and `param` itself."""
    _stage(param).set_full_parameter(param, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write the gradient of `param`."""
    _stage(param).set_full_gradient(param, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write the state `optim_state_key` of `param`."""
    _stage(param).set_full_state(param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient by update_func(gradient, param); parameters without one are left alone."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's fragment of the fp32 master; a copy, where that rests on a disk."""
    if not param.requires_grad:
        return None
    stage = _stage(param)
    return stage.read_local(param) if stage.update.is_away() else stage.local_parameter(param)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's fragment of the gradient, a copy in fp32, of an fp64 model in fp64.

    RuntimeError if there is none, or none reduced yet.
    """
    fragment = _stage(param).read_local(param, "grad") if param.requires_grad else None
    if fragment is None and param.requires_grad:
        raise RuntimeError("safe_get_local_grad: no reduced gradient: read it between backward and step")
    return None if fragment is None else fragment.to(exact(fragment.dtype))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's fragment of an optimizer state; a copy, where that rests on a disk. None before the first step."""
    if not param.requires_grad:
        return None
    stage = _stage(param)
    away = stage.update.is_away()
    return stage.read_local(param, optim_state_key) if away else stage.local_state(param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's fragment of the fp32 master."""
    _stage(param).write_local(param, value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's fragment of the gradient."""
    _stage(param).write_local(param, value, "grad")


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's fragment of an optimizer state. KeyError before the first step."""
    _stage(param).write_local(param, value, optim_state_key)


def trained_by(param: nn.Parameter) -> Stage | None:
    """The stage that trains `param`, if one does."""
    return stage_of(param) if param.requires_grad else None


def _stage(param: nn.Parameter) -> Stage:
    stage = stage_of(param)
    if stage is None:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} that no engine trains: pass one of engine.module")
    return stage
