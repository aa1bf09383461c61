"""A cut: layers and how each is cut, numbers that become a rank's part, parameters whose gradients are summed."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from refimpl.comm.group import Group
from refimpl.parallel.auto.sizes import divided, get, part_of_argument, put
from refimpl.parallel.draws import Draws
from refimpl.parallel.split import Split
from refimpl.parallel.styles import Style
from refimpl.parallel.swap import swap


@dataclass
class Cut:
    """Layers and how they are cut; attributes that become this rank's part; parameters left whole whose gradients are
    parts."""

    styles: dict[str, Style] = field(default_factory=dict)
    sizes: dict[tuple[str, str], Split] = field(default_factory=dict)  # (module, attribute) -> what it counts
    summed: list[str] = field(default_factory=list)

    def join(self, other: "Cut") -> None:
        self.styles |= other.styles
        self.sizes |= other.sizes
        self.summed = sorted({*self.summed, *other.summed})

    def apply(self, model: nn.Module, group: Group, draws: Draws | None = None) -> Callable[[], None]:
        """Cut the model in place. Returns what makes it whole again. ValueError for what cannot be dealt out."""
        plain = {name: model.get_submodule(name) for name in self.styles}
        with ExitStack() as undo:
            shared = aliases(model, self.styles)
            for module, key, p in shared:
                del module._parameters[key]
                undo.callback(module._parameters.update, {key: p})
            for module, key, layer in swap(model, self.styles, group, draws=draws):
                undo.callback(setattr, module, key, layer)
            for module, key, p in shared:
                module._parameters[key] = next(
                    getattr(model.get_submodule(name), own)
                    for name, layer in plain.items()
                    for own, q in layer.named_parameters(recurse=False)
                    if q is p
                )
            for (name, attribute), split in self.sizes.items():
                module, (holder, *_) = model.get_submodule(name), attribute.split(".")
                if attribute.endswith("="):
                    hook = partial(part_of_argument, attribute[:-1], split, group.rank)
                    undo.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
                    continue
                undo.callback(setattr, module, holder, getattr(module, holder))
                put(module, attribute, divided(get(module, attribute), split, group.rank))
            return undo.pop_all().close


def aliases(model: nn.Module, styles: Mapping[str, Style]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where modules that hold other modules have a cut layer's parameter under a name of their own, as BERT's head."""
    cut = {p for name in styles for p in model.get_submodule(name).parameters(recurse=False)}
    holders = [(name, module) for name, module in model.named_modules() if name not in styles and module._modules]
    return [(m, key, p) for _, m in holders for key, p in m._parameters.items() if p is not None and p in cut]
