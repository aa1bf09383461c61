"""Which modules of a model run now, forward or backward, by their paths in it: what a counter of FLOPs adds them to.

torch's ModuleTracker, which this stands in for, learns a module's path when something above it is called. Where parts
are called by themselves, as a pipeline's layers are, it takes their class for it, and two of a class are one; and it
misses the backward of a module at whose output backward begins. A module runs from its call to its return, and from the
moment that its output's gradient is there until the gradients of all its inputs are; where no input has one, until
backward ends. torch: torch/utils/module_tracker.py.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

ALL = "Global"  # runs always


def paths(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by the model's class and the path in it. One at several places has the first."""
    root = type(model).__name__
    return {f"{root}.{name}" if name else root: module for name, module in model.named_modules()}


class Running:
    """`parents`: the paths of the modules of `model` that run now, and ALL. Modules of others are not seen."""

    def __init__(self, model: nn.Module) -> None:
        self.parents = {ALL}
        self._names = {module: name for name, module in paths(model).items()}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "Running":
        self._hooks = [register_module_forward_pre_hook(self._called), register_module_forward_hook(self._returned)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _called(self, module: nn.Module, inputs: Any) -> None:
        if (name := self._names.get(module)) is not None:
            self.parents.add(name)
            if tensors := with_graph(inputs):
                self._hooks.append(register_multi_grad_hook(tensors, lambda _: self.parents.discard(name)))

    def _returned(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if (name := self._names.get(module)) is not None:
            self.parents.discard(name)
            # Of the node, not of the tensor: torch takes the only root of a backward pass for one that does not run.
            nodes = [t.grad_fn for t in with_graph(outputs) if t.grad_fn is not None]
            self._hooks += [node.register_prehook(partial(self._goes_backward, name)) for node in nodes]

    def _goes_backward(self, name: str, *_: Any) -> None:
        self.parents.add(name)
        ended = partial(self.parents.discard, name)  # of a checkpoint's pass in a pass, where that ends
        Variable._execution_engine.queue_callback(ended)


def with_graph(values: Any) -> list[Tensor]:
    """The tensors in it that a gradient goes to."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
