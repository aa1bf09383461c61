"""Parameters come when a module needs them and go when it is done: the hooks of ZeRO-3.

    before_forward -> need (gather, prefetch, wait) -> the module computes -> after_forward -> release
    before_backward -> need -> autograd computes -> last gradient arrives -> Zero3.reduce -> Unit.free

`before_backward` hangs on the module's output tensors, so it runs just before autograd enters the module. A parameter
used outside the module that owns it (a tied head that reads another module's weight) is noticed when it is read, is
gathered, and counts from then on among those of the module that read it. Under activation checkpointing forward runs
again inside backward; nothing is released there until its gradients are complete.
DeepSpeed: deepspeed/runtime/zero/parameter_offload.py and partitioned_param_coordinator.py.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from refimpl.zero.config import ZeroConfig
from refimpl.zero.order import RollCall
from refimpl.zero.prefetch import Pass, Trace
from refimpl.zero.unit import Unit, in_flight_elements, live_elements, unit_of, watch


class Fetch:
    """Gathers and frees `units_of` (by module path) around the modules of `model`."""

    def __init__(
        self, model: nn.Module, units_of: dict[str, list[Unit]], config: ZeroConfig, roll_call: RollCall
    ) -> None:
        self.model, self.config, self.roll_call = model, config, roll_call
        self.names = {m: name or "the model" for name, m in model.named_modules()}
        self.units_of = {m: list(units_of.get(name, [])) for name, m in model.named_modules()}
        self.units = [u for units in units_of.values() for u in units]
        self.trace = Trace()
        self.in_backward = False
        self._running: list[nn.Module] = []  # modules inside their forward now, outermost first
        for module in self.units_of:
            watch(module, self.accessed)
            module.register_forward_pre_hook(self.before_forward)
            module.register_forward_hook(self.after_forward, always_call=True)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._running and not self.in_backward:
            self.trace.restart()
        self._running.append(module)
        self.need(module, "forward")
        frozen = [u for u in self.units_of[module] if not any(p.requires_grad for p in u.params)]
        if frozen and torch.is_grad_enabled():
            # No gradient will say that backward is through with them; the gradient of the module's input does.
            for tensor in _tensors(args):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.release(frozen))  # type: ignore[no-untyped-call]

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._running.pop()
        if self.units_of[module]:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.need(module, "backward"))  # type: ignore[no-untyped-call]
        if not self.in_backward:
            busy = [u for m in self._running for u in self.units_of[m]]
            self.release([u for u in self.units_of[module] if u not in busy and not self._soon_again(u)])

    def need(self, module: nn.Module, during: Pass) -> None:
        """Return when all units of `module` are available, with those that come next on their way."""
        units = self.units_of[module]
        if not units:
            return
        for unit in units:
            self.trace.visit(unit, during)
        wanted = [u for u in units if u.is_free]
        ahead = self._ahead(units)
        announced = self.roll_call(
            f"{during} of {self.names[module]}" + "".join(f", gathers {u.name}" for u in wanted + ahead)
        )
        for unit in wanted + ahead:
            unit.start(announced)
        for unit in units:
            unit.wait()

    def _ahead(self, now: list[Unit]) -> list[Unit]:
        """What to prefetch beside the units needed now: the next of the trace that fit both budgets, in elements."""
        others = [u for u in self.units if u not in now]
        flying, live = in_flight_elements(others), live_elements(others) + sum(u.padded for u in now)
        chosen: list[Unit] = []
        for unit in self.trace.ahead(forward_only=not torch.is_grad_enabled() and not self.in_backward):
            if not unit.is_free or unit in now or unit in chosen:
                continue
            flying, live = flying + unit.padded, live + unit.padded
            if flying > self.config.prefetch_bucket_size or live > self.config.max_live_parameters:
                break
            chosen.append(unit)
        return chosen

    def _soon_again(self, unit: Unit) -> bool:
        distance = self.trace.distance(unit) if self.config.max_reuse_distance else None
        return distance is not None and distance < self.config.max_reuse_distance

    def release(self, units: list[Unit]) -> None:
        for unit in units:
            unit.free()

    def accessed(self, p: nn.Parameter) -> None:
        """module.<p> is read. A freed one is external to the module that runs now: gather it for that one."""
        unit = unit_of(p)
        if unit is None or not unit.is_free or not self._running:
            return
        reader = self._running[-1]
        self.units_of[reader].append(unit)
        self.trace.visit(unit, "forward")
        unit.start(self.roll_call(f"forward of {self.names[reader]} reads a parameter of {unit.name}"))
        unit.wait()

    def end(self) -> None:
        """Backward, or an iteration without one, is over: free what no gradient freed."""
        self.in_backward = False
        self.release(self.units)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
