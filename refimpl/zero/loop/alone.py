"""What `state_dict()` gives of a flat buffer: each tensor with a storage of its own, over the same memory.

Parameters are views of a few buffers, and who saves by hand looks at storages: `torch.save` and `pickle` write all
of one, and transformers 4.35 to 4.38 took all views of one for a tied weight, and saved the first alone. Nothing is
copied: what is written into such a tensor is in the model, as ever. The buffer lives as long as one of them does.
DeepSpeed gives the views; who knows of it calls `clone_tensors_for_torch_save`.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from refimpl.zero.hooks import Hook
from refimpl.zero.parameter import Shown, stage_of


class Alone:
    """Hooks on each module of a model that has parameters of its own that a stage looks after."""

    def __init__(self) -> None:
        self.given = WeakValueDictionary[tuple[int, torch.Size], Tensor]()  # a tied weight is one tensor

    def handles(self, model: nn.Module) -> Iterator[Any]:
        for module in model.modules():
            if any(stage_of(p) for p in module.parameters(recurse=False)):
                yield module.register_state_dict_post_hook(Hook(self.after))  # type: ignore[no-untyped-call]

    def after(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """A state_dict of `module` was filled."""
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            tensor = state.get(prefix + name)
            if type(tensor) is Tensor and (stage := stage_of(p)) and is_part(tensor):  # and no parameter itself
                state[prefix + name] = self.alone(p, tensor, stage.shown)

    def alone(self, p: nn.Parameter, view: Tensor, shown: Shown) -> Tensor:
        """The memory of `view`, behind a storage that is as long; writes to it count as writes to p."""
        at = (view.data_ptr(), view.shape)
        if (tensor := self.given.get(at)) is None:
            with torch.cuda.device(view.device) if view.is_cuda else nullcontext():  # torch gives no other GPU's away
                tensor = self.given[at] = shown.view(p, from_dlpack(view))
        return tensor

    def let_go(self, params: Iterable[nn.Parameter]) -> None:
        """Their buffers are about to give their memory back: what was given becomes views, which follow them."""
        for p in params if self.given else ():  # none in ZeRO-3, whose parameters may have no memory
            if (tensor := self.given.pop((p.data_ptr(), p.shape), None)) is not None:
                tensor.data = p.data


def is_part(tensor: Tensor) -> bool:
    """Whether its storage is longer than it, where there is a way to another: DLPack does not know every device."""
    return tensor.device.type in ("cpu", "cuda") and tensor.untyped_storage().nbytes() > tensor.nbytes
