"""When a stage acts by itself: before and after the model's forward, when a backward begins, and when it ends."""

import warnings
from typing import Any

import torch
from torch import nn

from refimpl.zero.backward import in_backward
from refimpl.zero.hooks import Hook, untraced, weakly
from refimpl.zero.loop.alone import Alone
from refimpl.zero.loop.changing import Changing
from refimpl.zero.loop.outputs import tensors_of


class Hooked(Changing):
    """A part of `Stage`."""

    def listen(self) -> None:
        """To the model. `BackwardPass` calls the rest: see `Stage.build`."""
        self.alone = Alone()
        self.handles += [
            self.model.register_forward_pre_hook(untraced(self.before_forward)),
            self.model.register_forward_hook(untraced(self.after_forward)),
            self.model.register_state_dict_pre_hook(Hook(self.before_state_dict)),  # type: ignore[no-untyped-call]
            *self.alone.handles(self.model),
        ]
        if self.config.delayed_update:  # or an update under way would be published over what is loaded
            hook = self.model.register_load_state_dict_pre_hook
            self.handles.append(hook(Hook(lambda *_: self.catch_up())))  # type: ignore[no-untyped-call]

    def before_forward(self, model: nn.Module, args: Any) -> None:
        if not self.update.raised:  # which all ranks hear at the step: one that refused alone would leave them waiting
            self.update.refuse_torn()
        self.parked.refuse("lp_params")
        if not in_backward():
            if not self.passes.settle():
                warnings.warn(
                    f"{type(self).__name__}: the backward before this forward raised: its gradients, and those "
                    "accumulated since the last step, are dropped",
                    stacklevel=2,
                )
            self.include_thawed()
        self.buffers.share(model.training and torch.is_grad_enabled() and not in_backward())

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Let the outermost backward be known before any gradient arrives: one may come from a checkpoint inside."""
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(weakly(self.passes.sign))  # type: ignore[no-untyped-call]

    def before_state_dict(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:  # which a load asks for the names alone
            self.update.refuse_torn()

    def begin_backward(self) -> None:
        self.parked.refuse("lp_params", "lp_grads", "contiguous_grad_buffer")
        self.gradients.begin()
        self.update.alike.begin_backward()

    def end_backward(self, asked: bool) -> None:
        self.scaled.end_backward(self.gradients.brought)
        self.gradients.end(asked)
        self.free_gathered()
        self.update.alike.refuse_hooked()

    def drop_backward(self) -> None:
        """A backward raised: what it left, and what was accumulated before it, is dropped."""
        self.gradients.drop()
        self.free_gathered()
        for forget in self.on_drop:
            forget()
