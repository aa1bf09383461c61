"""`state_dict()` and `load_state_dict()` of a sharded model, one module at a time: whole weights go out and come in.

Both are collectives: every rank calls them, and `state_dict` gives every rank its own whole copy. A rank that needs
none calls `stage.full_state_dict()`, which keeps rank 0's alone. One unit is gathered at a time for saving, for loading
those of a module and the ones around it. DeepSpeed writes empty tensors here and asks for `zero_to_fp32` instead.

So its users' rank 0 calls `state_dict()` alone, for the names (OpenRLHF's save, PEFT's of `modules_to_save`). With
REFIMPL_STATE_DICT=names nothing is gathered: what is sharded comes as the parameter itself, of which any use but of its
shape is an error that says how it is had, unless a `GatheredParameters` block holds it whole. A pickle has it empty,
with a warning, as DeepSpeed's has (DeepSpeed-Chat's rank 0 writes such a file, and the gathered one in its place).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.zero.gather.unit import unit_of, whole
from refimpl.zero.hooks import Hook
from refimpl.zero.parameter import names_alone


def every_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's parameters, what is tied under each of its names.

    A model's own `named_parameters` may be older than `remove_duplicate`, as that of GLM's FP16_Module, which was once
    Megatron's: there the other names of what is tied are in `state_dict()`.
    """
    takes = signature(model.named_parameters).parameters.values()
    if any(p.name == "remove_duplicate" or p.kind is Parameter.VAR_KEYWORD for p in takes):
        return model.named_parameters(remove_duplicate=False)
    saved = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, nn.Parameter)}
    return iter((dict(model.named_parameters()) | saved).items())


def named_tensors(model: nn.Module) -> dict[str, Any]:
    """What `model.state_dict(keep_vars=True)` has, and behind it the parameters that it does not name.

    A `state_dict` of the model's own may leave some out, to be saved elsewhere: TRL's value head over a PEFT model
    names the head alone. A checkpoint, and what DeepSpeed consolidates in stage 3, have every parameter.
    """
    state = model.state_dict(keep_vars=True)
    named = {id(tensor) for tensor in state.values()}
    return {**state, **{n: p for n, p in every_name(model) if id(p) not in named}}


def every_buffer(model: nn.Module) -> dict[str, Tensor]:
    """The model's buffers, what is tied under each of its names; as `state_dict()` calls them, where it does.

    A wrapper that hands `state_dict` and `named_parameters` on to the model inside, as GLM's, has its own names for
    buffers in `named_buffers` alone.
    """
    own = {id(b) for b in model.buffers()}
    named = {name: t for name, t in model.state_dict(keep_vars=True).items() if id(t) in own}
    seen = {id(t) for t in named.values()}
    return {**named, **{n: b for n, b in model.named_buffers(remove_duplicate=False) if id(b) not in seen}}


def copied(state: Mapping[str, Any], copies: dict[Tensor, Tensor]) -> dict[str, Any]:
    """`state` in host memory of its own. `copies`: of its tensors, those that there are; the others are added."""
    copies |= {t: t.detach().to("cpu", copy=True) for t in state.values() if isinstance(t, Tensor) and t not in copies}
    return {name: copies[t] if isinstance(t, Tensor) else deepcopy(t) for name, t in state.items()}


class StateDicts:
    """Hooks on each of `modules` that has sharded parameters of its own.

    Of a part of `model` that is saved by itself the ranks are told before it gathers: a rank may be alone in that.
    """

    def __init__(self, modules: Iterable[nn.Module], model: nn.Module | None = None) -> None:
        self.handles: list[Any] = []
        self.paused, self.names_alone = False, names_alone()
        self.is_told = False  # whether the ranks know that the whole model is being saved
        self._loading: dict[nn.Module, whole] = {}
        if model is not None:
            over = Hook(self.all_saved)
            self.handles.append(model.register_state_dict_post_hook(over))  # type: ignore[no-untyped-call]
        for module in modules:
            if any(unit_of(p) for p in module.parameters(recurse=False)):
                self.handles += [
                    module.register_state_dict_pre_hook(Hook(self.before_save)),  # type: ignore[no-untyped-call]
                    module.register_state_dict_post_hook(Hook(self.after_save)),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(Hook(self.before_load)),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_post_hook(Hook(self.after_load)),  # type: ignore[no-untyped-call]
                ]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is gathered for a state_dict in the block."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        units = whole(module.parameters(recurse=False)).units
        if not (keep_vars or self.paused or self.is_told or self.names_alone or all(unit.held for unit in units)):
            units[0].begin(f"a state_dict of {units[0].name}")
        for unit in units:
            unit.is_placeholder = True

    @torch.no_grad()
    def after_save(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Put whole copies where the placeholders stand, or the parameters themselves."""
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            unit = unit_of(p)
            if unit is None:
                continue
            unit.is_placeholder = False
            if not self.paused and state.get(prefix + name) is not p:  # keep_vars asks for the parameter itself
                state[prefix + name] = p if self.names_alone and not unit.held else unit.copy_of(p)

    def all_saved(self, *_: Any) -> None:
        """The whole model is."""
        self.is_told = False

    def before_load(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Gather them, unless a block that is open has those that `state` names.

        Who calls `_load_from_state_dict` himself ends none; transformers does on rank 0, a merged weight at a time.
        """
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        named = whole(p for name, p in own if prefix + name in state).units
        if any(module not in set(begun.modules()) for begun in self._loading):
            raise RuntimeError(
                "_load_from_state_dict of a sharded module, called by hand, begins what load_state_dict ends: "
                "call that on every rank, or put this inside `with GatheredParameters(parameters, modifier_rank=0):`"
            )
        gathered = whole(module.parameters(recurse=False))
        if not all(unit.held for unit in named or gathered.units):
            self._loading[module] = gathered
            gathered.__enter__()

    @torch.no_grad()
    def after_load(self, module: nn.Module, *_: Any) -> None:
        """Every rank has loaded the same: each keeps its shard."""
        gathered = self._loading.pop(module, None)
        for unit in whole(module.parameters(recurse=False)).units:
            if not unit.is_free:
                unit.keep()
        if gathered is not None:
            gathered.__exit__()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
