"""What autograd saves of a parameter under ZeRO-3: noted when it is saved, gathered when backward unpacks it.

    saved                                    kept until backward                  unpacked
    a parameter of a unit                    itself, freed or not                 when the unit is gathered
    a part of a unit's memory                a view of it, empty while freed      when the unit is gathered
    a parameter in another dtype             which parameter, and its shape       rounded once more
    anything else                            itself                               itself

The third is autocast's: it rounds the weight of each product, and the copies of all of them would wait for backward, 2
bytes a parameter on every rank. Of a frozen parameter the copy stays: nothing tells whose it is.
Who saves a parameter in an `autograd.Function` gets itself back if it is frozen; of one that is trained autograd makes
another tensor, from which `leaf_of` finds it.
DeepSpeed: deepspeed/runtime/zero/linear.py, a linear layer that saves the parameter itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from refimpl.zero.gather.unit import Unit, unit_of


@dataclass(frozen=True)
class Recast:
    """`parameter` in another dtype, or a view of that."""

    parameter: Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def again(self) -> Tensor:
        """While the parameter is there."""
        return self.parameter.detach().to(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass
class Watch:
    """What autograd saves while a module runs: for the hooks `around`, and noted if it is a unit's.

    unit_at: units by the memory they lie in.
    """

    unit_at: Mapping[int, Unit]
    pack_around: Callable[[Tensor], Any] | None
    unpack_around: Callable[[Any], Tensor] | None

    def pack(self, tensor: Tensor) -> tuple[Unit | None, int, Any]:
        dense = tensor.layout is torch.strided  # a sparse one has several memories, and no parameter is one
        if isinstance(tensor, nn.Parameter) and (own := unit_of(tensor)) and not self.pack_around:
            return own, own.changes, tensor  # maybe of another stage, or freed when it is saved
        unit = self.unit_at.get(tensor.untyped_storage()._cdata) if dense else None
        # A parameter itself is put elsewhere when it is freed; what it is a view of stays. An output of the node that
        # saves it would hold the graph that holds it: a forward without a backward would keep its activations for ever.
        kept = tensor.detach() if tensor.requires_grad or unit is not None else tensor
        if self.pack_around:
            return unit, 0, self.pack_around(kept if unit is not None and tensor.is_leaf else tensor)
        source = source_of(tensor) if unit is None and dense else None
        if source is not None and (home := self.unit_at.get(source.untyped_storage()._cdata)):
            again = Recast(source, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
            return home, home.changes, again
        return unit, unit.changes if unit else 0, kept

    def unpack(self, packed: tuple[Unit | None, int, Any]) -> Tensor:
        unit, changes, kept = packed
        if unit is not None and not self.unpack_around and unit.changes != changes:  # as autograd says of a plain one
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"weights of {unit.name}, by a step or a load behind this forward. Run the forward again"
            )
        # Which may run a checkpointed function again.
        tensor = self.unpack_around(kept) if self.unpack_around else kept
        if unit is not None and not unit.is_whole:
            if unit.is_free and not unit.asked("backward"):
                raise RuntimeError(
                    f"backward needs the weights of {unit.name}, and their stage is gone: nothing holds the model, the "
                    "optimizer or the stage any more. Keep one of them until backward is through"
                )
            unit.wait()
        return tensor.again() if isinstance(tensor, Recast) else tensor


def source_of(tensor: Tensor) -> Tensor | None:
    """The leaf that `tensor` is a plain copy of in another dtype, or a view of one: laid out as the leaf, unchanged."""
    copy = tensor if tensor._base is None else tensor._base
    if copy.grad_fn is None or copy.grad_fn.name() != "ToCopyBackward0" or copy._version:
        return None
    leaf: Tensor | None = getattr(copy.grad_fn.next_functions[0][0], "variable", None)
    return leaf if leaf is not None and (leaf.stride(), leaf.device) == (copy.stride(), copy.device) else None


def leaf_of(tensor: Tensor) -> nn.Parameter | None:
    """The parameter that `tensor`, unpacked in backward, stands for: autograd adds its gradient to that one's."""
    if isinstance(tensor, nn.Parameter):  # of which no more is asked: it may be one that has no shape yet
        return tensor
    if not (tensor.requires_grad and tensor.is_leaf):
        return None
    leaf = getattr(get_gradient_edge(tensor).node, "variable", None)
    return leaf if isinstance(leaf, nn.Parameter) else None
