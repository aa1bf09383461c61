"""Parameters come when a module needs them and go when it is done: the hooks of ZeRO-3.

    before_forward -> need (gather, prefetch, wait) -> the module computes -> after_forward -> release
    before_backward -> need -> autograd computes -> last gradient arrives -> Zero3.reduce -> Unit.free

`before_backward` hangs on the module's output tensors, so it runs just before autograd enters the module; what autograd
saved of a parameter asks for it once more when it is unpacked, whatever way backward came. A parameter used outside the
module that owns it (a tied head that reads another module's weight) is noticed when it is used, is gathered, and counts
from then on among those of the module that used it. Under activation checkpointing forward runs again inside backward;
nothing is released there until its gradients are complete.
DeepSpeed: deepspeed/runtime/zero/parameter_offload.py and partitioned_param_coordinator.py.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.zero.backward import in_backward
from refimpl.zero.config import ZeroConfig
from refimpl.zero.gather.path import Path
from refimpl.zero.gather.prefetch import Pass, next_ones, soon_again
from refimpl.zero.gather.transforms import explain, refuse_transformed
from refimpl.zero.gather.unit import Unit
from refimpl.zero.gather.watch import Watch
from refimpl.zero.hooks import untraced, weakly
from refimpl.zero.loop.outputs import tensors_of


@dataclass
class Running:
    """A module inside its forward; `again`: inside backward, for a checkpoint.

    `around`: who looked at what autograd saves when it began.
    """

    module: nn.Module
    again: bool
    around: tuple[Any, Any] | None
    is_watched: bool = False  # whether what autograd saves is looked at


class Fetch:
    """Gathers and frees `units_of` (by module path) around the modules of `model`."""

    def __init__(
        self,
        model: nn.Module,
        units_of: dict[str, list[Unit]],
        config: ZeroConfig,
        path: Path,
        sign: Callable[[], None],
        complete: Callable[[Unit], None],
    ) -> None:
        """`sign` is called when backward first needs a module: see `BackwardPass`; `complete` when it is through."""
        self.model, self.config, self.path, self.sign = model, config, path, sign
        self.complete = complete
        # By id, while the modules are held: the hash of a module may change. A torchmetrics Metric's does as it counts.
        self.modules = list(model.modules())
        self.names = {id(m): name or "the model" for name, m in model.named_modules()}
        self.units_of = {id(m): list(units_of.get(name, [])) for name, m in model.named_modules()}
        self.units = list(dict.fromkeys(u for units in units_of.values() for u in units))
        self.joins = any(unit.is_joined for unit in self.units)
        self.gathered = {u for u in self.units if not u.is_free}
        self.unit_at = {u.full.untyped_storage()._cdata: u for u in self.units}
        self.running: list[Running] = []  # outermost first
        self.leaving: dict[Unit, None] = {}  # freed as soon as something else is needed: of several modules in a row
        self.is_recorded = False  # whether the backward under way is
        self.keeps = False  # nothing is freed before the backward after a recorded one is over
        self.handles: list[Any] = []
        self.on_leaves: list[Any] = []  # hooks on tensors that outlive the graph, such as one input of every step
        self.on_inputs: dict[int, list[Any]] = {}  # hooks on what a checkpoint's second run of a leaf module gets
        used = weakly(self.used)
        for unit in self.units:
            unit.on_use, unit.among, unit.unit_at = used, self.gathered, self.unit_at
            unit.fails, unit.begin = path.fails, path.begin
        self.several = {id(m): us for m in self.modules if of_several(m, us := self.units_of[id(m)])}
        for module in self.modules:
            before, after = untraced(self.before_forward), untraced(self.after_forward)
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self.handles.append(module.register_forward_hook(after, always_call=True))

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        again = in_backward()
        if module is self.model and self.running and not again and not is_within(module):
            self.forget()
        is_outermost = not self.running and not again
        self.running.append(Running(module, again, torch._C._autograd._top_saved_tensors_default_hooks(True)))
        if torch._C._get_tracing_state():  # which would read what is freed, past every hook
            raise RuntimeError(
                "torch.jit.trace of a model under ZeRO-3: trace copy.deepcopy(model), made on every rank"
            )
        may_send = torch.is_grad_enabled() or not all(unit.held for unit in self.units)
        if is_outermost and may_send and self.is_of_all(module):
            self.path.begin(self._iteration(module))
        self.need(module, "forward")
        self.watch_saved(module)
        if torch.is_grad_enabled() and frozen(self.units_of[id(module)]):
            # No gradient will say that backward is through with them; the gradient of the module's input does.
            for tensor in tensors_of((args, kwargs)):
                if tensor.requires_grad:
                    handle = tensor.register_hook(weakly(self.after_backward, module))  # type: ignore[no-untyped-call]
                    self.on_leaves += [handle] if tensor.grad_fn is None else []
        if id(module) in self.several and torch.is_grad_enabled():
            self.hold(module, [t for t in tensors_of((args, kwargs)) if t.requires_grad])

    def is_of_all(self, module: nn.Module) -> bool:
        """Whether all ranks run `module` or none: a part that each of them has whole one may run alone."""
        return module is self.model or any(self.units_of.get(id(part)) for part in module.modules())

    def hold(self, module: nn.Module, inputs: list[Tensor]) -> None:
        """Reduce the units of a leaf module when backward has the gradients of its inputs, and so is through with it.

        That is at one place on every rank, whichever of the modules inside a rank has used, such as an expert. The
        gradient of the caller's own tensor comes at backward's end, as what is left does; torch cannot be asked about
        it inside `autograd.grad` (a gradient penalty).
        """
        if inputs:
            for unit in self.several[id(module)]:
                unit.awaited += 1
        if computed := [t for t in inputs if t.grad_fn is not None or self.running[-1].again]:
            through = weakly(self.through, module)
            handle = torch.autograd.graph.register_multi_grad_hook(computed, untraced(through), mode="all")
            if any(t.grad_fn is None for t in computed):  # it holds its node, which holds it: for good, if not removed
                self.on_inputs.setdefault(id(module), []).append(handle)

    def through(self, module: nn.Module, *_: Any) -> None:
        if not self.keeps:
            self.drop_hooks(id(module))
        for unit in self.several[id(module)]:
            unit.awaited -= 1
            if unit.awaited <= 0:
                self.complete(unit)

    def drop_hooks(self, module: int) -> None:
        for handle in self.on_inputs.pop(module, ()):
            handle.remove()

    def _iteration(self, module: nn.Module) -> str:
        """The kind of iteration that begins with a forward of `module`: each has a trace of its own."""
        mode = "training" if self.model.training else "evaluation"
        return (
            f"a new forward of {self.names[id(module)]} ({mode}, {'' if torch.is_grad_enabled() else 'no '}gradients)"
        )

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.running or self.running[-1].module is not module:
            return  # it never began: a hook before ours raised
        if self.running.pop().is_watched:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            explain(self.names[id(module)])
        if self.units_of[id(module)]:
            for tensor in tensors_of(output):
                if shown := self.unit_holding(tensor):
                    shown.is_shown = True  # who goes on computing with a view keeps its memory
                if tensor.requires_grad:
                    node = tensor.grad_fn  # its hooks come after the tensor's: a leaf module behind is freed first
                    hooked = tensor.register_hook if node is None else node.register_prehook
                    handle = hooked(weakly(self.before_backward, module))
                    self.on_leaves += [handle] if node is None else []
        if not in_backward():
            busy = [u for inside in self.running for u in self.units_of[id(inside.module)]]
            done = [u for u in self.units_of[id(module)] if u not in busy]
            self.leave([u for u in done if not soon_again(self.path.trace, u, self.config)])
            if not self.running:
                self.release(list(self.leaving))

    def unit_holding(self, tensor: Tensor) -> Unit | None:
        """The unit in whose memory `tensor` lies, if it is no parameter, which would be put elsewhere."""
        if isinstance(tensor, nn.Parameter) or not torch._C._has_storage(tensor):
            return None
        return self.unit_at.get(tensor.untyped_storage()._cdata)

    def forget(self) -> None:
        """The forward before ended in what torch tells no hook, such as KeyboardInterrupt: nothing is running."""
        while self.running:
            inside = self.running.pop()
            if inside.is_watched and not inside.again:  # else autograd's end has done so
                torch._C._autograd._pop_saved_tensors_default_hooks()
        self.end()

    def before_backward(self, module: nn.Module, *_: Any) -> None:
        self.sign()
        # create_graph: this backward is recorded. What it saves must be there when the next one goes through it.
        self.is_recorded = torch.is_grad_enabled()
        self.keeps = self.keeps or self.is_recorded
        self.need(module, "backward")

    def after_backward(self, module: nn.Module, *_: Any) -> None:
        """Free the units of which no gradient will say that backward is through with them."""
        if not self.keeps:
            self.leave(frozen(self.units_of[id(module)]))

    def watch_saved(self, module: nn.Module) -> None:
        """Look at what autograd saves while `module` runs: what lies in a unit must be there when it is unpacked.

        So backward is right whatever the module's output looks like and whichever way it goes on. autograd asks the
        innermost hooks alone, so these hand on to those around them what is theirs: a checkpoint's, for one. Inside a
        checkpoint that began within `module` there is no place for more (it would end by taking away these in place of
        its own) and no need: backward runs its function again.
        A unit of several modules is still there when each of them is done, and nothing tells who reads it then: the
        outermost module is watched too.
        """
        enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        running = self.running[-1]
        may_save = self.units_of[id(module)] or (self.joins and running is self.running[0])
        if may_save and not running.is_watched and torch.is_grad_enabled() and enabled:
            around = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if around != running.around:
                return
            outer = getattr(around[0], "__self__", None) if around else None
            if isinstance(outer, Watch) and outer.unit_at is self.unit_at:
                return
            watch = Watch(self.unit_at, *(around or (None, None)))
            torch._C._autograd._push_saved_tensors_default_hooks(watch.pack, watch.unpack)
            running.is_watched = True

    def need(self, module: nn.Module, during: Pass) -> None:
        """Return when all units of `module` are available, with those that come next on their way."""
        units = self.units_of[id(module)]
        if all(unit.held for unit in units):
            return
        fresh = [u for u in units if not (u.is_joined and self.path.trace.last == (u, during))]
        for unit in fresh:
            self.path.visit(unit, during)
        if self.leaving:
            self.release([u for u in self.leaving if u not in units])
        ahead = next_ones(self.path.trace, units, self.gathered, self.config) if fresh else []
        gather(units, ahead)

    def leave(self, units: list[Unit]) -> None:
        """A module is through with its units; its neighbour may be about to need the same."""
        self.leaving |= dict.fromkeys(u for u in units if u.is_joined)
        self.release([u for u in units if not u.is_joined])

    def release(self, units: list[Unit]) -> None:
        for unit in units:
            unit.free()
            self.leaving.pop(unit, None)

    def used(self, unit: Unit, what: str) -> None:
        """`what` computes with a parameter of `unit`, which is freed: it is external to the module that runs now.

        Outside the model's forward and backward nothing is gathered: only this rank may have come here.
        """
        if in_backward():
            self.sign()
            self.path.visit(unit, "backward")
            unit.wait()
        elif self.running:
            reader = self.running[-1].module
            refuse_transformed(unit.name)
            self.units_of[id(reader)].append(unit)
            self.path.visit(unit, "forward")
            unit.wait()
            self.watch_saved(reader)

    def end(self) -> None:
        """Backward, or an iteration without one, is over: free what no gradient freed."""
        self.keeps, self.is_recorded = self.is_recorded, False
        if not self.keeps:
            self.release(self.units)
            for module in list(self.on_inputs):  # of a backward that raised, or was recorded
                self.drop_hooks(module)
            while self.on_leaves:
                self.on_leaves.pop().remove()

    def remove(self) -> None:
        """Let go of the modules."""
        for handle in self.handles:
            handle.remove()
        for unit in self.units:
            unit.on_use, unit.begin = None, lambda _: None


def is_within(module: nn.Module) -> bool:
    """Whether a forward of `module` is under way around the one that begins."""
    frame: FrameType | None = sys._getframe()
    calls = 0
    while frame is not None:
        calls += frame.f_code is nn.Module._wrapped_call_impl.__code__ and frame.f_locals["self"] is module
        frame = frame.f_back
    return calls > 1


def gather(now: list[Unit], ahead: Iterable[Unit] = ()) -> None:
    """Return when the units `now` are available, with those `ahead` on their way: all start before one is awaited."""
    for unit in now:
        refuse_transformed(unit.name)
        unit.start()
    for unit in ahead:
        unit.prefetch()
    for unit in now:
        unit.wait()


def frozen(units: list[Unit]) -> list[Unit]:
    return [unit for unit in units if not any(p.requires_grad for p in unit.params)]


def of_several(module: nn.Module, units: list[Unit]) -> bool:
    """Whether these units of `module` have parameters of modules inside it too."""
    inside = set(module.parameters()).difference(module.parameters(recurse=False))
    return any(p in inside for unit in units for p in unit.params)
