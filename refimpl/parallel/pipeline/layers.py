"""Layers that do not exist yet: what to build, said on every rank, built on the rank that runs it.

A model that is too large for one rank cannot be built on it and then be split. `LayerSpec(nn.Linear, 512, 512)` takes
no memory; `build` makes the module. `TiedLayerSpec` names the same weights in several places of the chain, such as the
embedding at its begin and the head at its end.
DeepSpeed: deepspeed/runtime/pipe/module.py, LayerSpec, TiedLayerSpec.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class LayerSpec:
    """A module's class and arguments."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        """ValueError if `typename` is no class of modules."""
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ValueError(
                f"LayerSpec needs a class of torch.nn.Module, not {typename!r}; a function is a layer as it is"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        args = [*map(repr, self.module_args), *(f"{k}={v!r}" for k, v in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(args)})"

    def build(self, log: bool = False) -> nn.Module:
        """The module. log: say that it is built."""
        if log:
            logging.getLogger("refimpl").info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def shape(self) -> nn.Module:
        """The module without memory, on torch's meta device: to count its parameters.

        With memory if building it takes numbers: `.item()`, `.to(device)`, pretrained weights.
        """
        try:
            with torch.device("meta"):
                return self.build()
        except RuntimeError:
            return self.build()


class TiedLayerSpec(LayerSpec):
    """A layer whose module is that of all others with the same key."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        """forward_fn(module, x): what this place does with it; its own forward if None.

        tied_weight_attr: what is one parameter in all stages even where their classes call it otherwise, "weight" here
        and "inner.weight" there. What has one name in several stages is one parameter anyway: see `ties.py`.
        """
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


Layer = LayerSpec | nn.Module | Callable[[Any], Any]


def type_name(layer: Layer) -> str:
    """The class's name, or the function's."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)
