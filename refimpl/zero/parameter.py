"""A parameter that a stage looks after: it stays a plain parameter to use, and what would go wrong unseen does not.

    Managed   p.grad      shows the gradient where the stage keeps it; p.grad = None drops it there
              p.data      is the memory; what is written to it is counted, and autograd does not see it: see `Shown`
              p.data = t  is refused: p.data.copy_(t) copies. Before there is a stage t is copied, if it is of p's kind,
                          and in a `GatheredParameters` block t is p's memory until the block ends, and copied then
              p.set_(t)   copies t
              p.requires_grad_(True)   asks the stage to train it from now on
    Freed     (ZeRO-3) as Managed, and has no values now: whoever computes with it gathers it first, or is told to

An ordinary `nn.Parameter` becomes one by its `__class__` and is one again when the stage lets go. A copy (deepcopy,
pickle) is an ordinary parameter with the whole values. DeepSpeed hangs the same on `param.ds_*` attributes
(deepspeed/runtime/zero/partition_parameters.py) and lets `p.grad` be None.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from refimpl.zero.gather.cast import Cast, became, converted

if TYPE_CHECKING:
    from refimpl.zero.gather.unit import Unit
    from refimpl.zero.stage import Stage

_TENSOR: Any = Tensor  # its descriptors are how a subclass reaches what it overrides
DATA, GRAD, REQUIRES_GRAD = _TENSOR.data, _TENSOR.grad, _TENSOR.requires_grad


class Shown(dict[nn.Parameter, Tensor]):
    """The parameters whose `data` a script has taken, each with what counts its writes to it.

    That is a tensor without memory, whose version counter all share that were given. The parameter's own would make
    autograd refuse what torch allows, such as a clamp between forward and backward.
    """

    def view(self, p: nn.Parameter, memory: Tensor) -> Tensor:
        """`memory`, as p's `data`."""
        if p not in self:
            with torch.inference_mode(False):
                self[p] = memory.new_empty(0)
        counter = self[p]
        DATA.__set__(counter, memory)  # a tensor keeps its counter through this,
        given = counter.detach()  # and shares it with a view
        DATA.__set__(counter, memory.new_empty(0))
        return given

    def count(self, p: nn.Parameter, memory: Tensor) -> None:
        """A write to p that is none to its memory."""
        self.view(p, memory)
        self[p].zero_()  # nothing, which raises the counter

    def writes(self) -> int:
        return sum([counter._version for counter in self.values()])


class Managed(nn.Parameter):
    """A parameter of a stage. `stage` is set by `Stage`; without one it behaves as any other.

    It is held weakly: the graph of a tensor that the model keeps holds parameters, and through a graph Python's garbage
    collector does not see.
    """

    held: "Callable[[], Stage | None]" = staticmethod(lambda: None)

    @property
    def stage(self) -> "Stage | None":
        return self.held()

    @stage.setter
    def stage(self, stage: "Stage") -> None:
        self.held = weakref.ref(stage)

    @stage.deleter
    def stage(self) -> None:
        del self.held

    @property
    def grad(self) -> Tensor | None:
        """What the stage holds for this parameter: see `GradientView.read`."""
        return raw_grad(self) if self.stage is None else self.stage.view.read(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self.stage is None:
            GRAD.__set__(self, value)
        else:
            self.stage.view.write(self, value)

    @property
    def data(self) -> Tensor:
        if torch.compiler.is_compiling():  # it does not see who counts, and breaks its graph here
            return torch.compiler.disable(data_of)(self)  # type: ignore[no-any-return, no-untyped-call]
        return data_of(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:
            return
        stage, unit = self.stage, getattr(self, "zero_unit", None)
        if stage is None and unit is not None and became(unit, self, value):
            return
        mine = DATA.__get__(self)
        alike = (value.dtype, value.device, value.shape) == (mine.dtype, mine.device, mine.shape)
        if alike and (value.data_ptr(), value.stride()) == (mine.data_ptr(), mine.stride()):
            return
        if alike and stage is None:
            self.data.copy_(value)
            return
        if alike and unit is not None and unit.held:
            unit.shown.count(self, mine)
            DATA.__set__(self, value)  # until the block ends: see `Unit.take_in`
            return
        name = stage.name_of(self) if stage else f"of {unit.name}" if unit else ""
        where = f"a buffer of {type(stage).__name__ if stage else 'ZeRO-3'}"
        if alike:
            raise RuntimeError(
                f"parameter {name}.data = ...: it lies in {where} and stays there. Copy: p.data.copy_(new), and keep "
                "old ones as p.detach().clone()"
            )
        raise RuntimeError(
            f"parameter {name}: it lies in {where} as {mine.dtype} on {mine.device}, shape {tuple(mine.shape)}, and "
            f"cannot become {value.dtype} on {value.device}, shape {tuple(value.shape)}. Move or cast the model before "
            "the stage is built"
        )

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Of a tensor: its values are copied (torch.nn.utils.parametrize ends so). Of itself: no write."""
        source = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(source, Tensor) or self.stage is None:
            return super().set_(*args, **kwargs)
        if source is not self and (source.dtype, source.device, source.shape) == (self.dtype, self.device, self.shape):
            self.data.copy_(source)
        else:
            self.data = source
        return self

    @property
    def requires_grad(self) -> bool:
        return super().requires_grad  # the compiler would take the descriptor for this property

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        REQUIRES_GRAD.__set__(self, value)
        if value and self.stage is not None:
            self.stage.unfrozen(self)

    def module_load(self, other: Tensor, assign: bool = False) -> Tensor:
        """What torch asks where a load swaps tensors: no, or an update would be of memory that no parameter has."""
        raise RuntimeError(
            "load_state_dict would put another tensor in the place of a parameter that a stage looks after: "
            "torch.__future__.set_swap_module_params_on_conversion(False) first"
        )

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As torch's; but "cpu:1", as accelerate calls the CPU on rank 1, is where all of it is already: no copy."""
        return super().to(*map(unnumbered, args), **{key: unnumbered(value) for key, value in kwargs.items()})

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """As torch's. It runs before the stage takes the gradient away, whenever it comes."""
        handle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if self.stage is not None and self in self.stage.gradients.bucket_of:
            self.stage.gradients.listen(self)
        return handle

    def requires_grad_(self, requires_grad: bool = True) -> "Managed":
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.whole_copy(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.whole_copy(), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def whole_copy(self) -> Tensor:
        """The parameter's values in memory of their own. For a sharded one a collective."""
        return DATA.__get__(self).clone()  # type: ignore[no-any-return]


def data_of(p: Managed) -> Tensor:
    """Its memory, as `p.data`. Of what is freed p itself, which may be asked for its shape: to compute is told."""
    if isinstance(p, Freed) and not p.zero_unit.asked("data"):
        return p
    memory: Tensor = DATA.__get__(p)
    holder = getattr(p, "zero_unit", p.stage)
    return memory if holder is None else holder.shown.view(p, memory)


class Freed(Managed):
    """A sharded parameter between two uses: it has a shape, and no values."""

    zero_unit: "Unit | Cast"  # which knows how it can be had

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in CONVERSIONS:
                p, *more = args
                if isinstance(p, Freed):
                    return converted(func, spoken(func), p, DATA.__get__(p), *more, **(kwargs or {}))
                return func(*args, **(kwargs or {}))  # x.to(p), of whose kind x is to be
            if func is nn.functional.pad and not any(args[1]):
                return args[0]  # by nothing, as transformers' tie_weights does with the bias of a head
            if func is Tensor.data_ptr and args[0].stage is None and not args[0].zero_unit.asked("data_ptr"):
                return 0  # as in DeepSpeed: transformers' run_clm.py tells tied parameters by it when it counts them
            if func not in HARMLESS:
                for p in tree_leaves((args, kwargs)):
                    if isinstance(p, Freed):
                        p.zero_unit.wanted(p, spoken(func))
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Where a state_dict is of names, a pickle is too: rank 0 of DeepSpeed's scripts writes it alone."""
        if not names_alone():
            return super().__reduce_ex__(protocol)
        warnings.warn(
            "a sharded parameter is written as an empty tensor, as DeepSpeed writes it: gather it first "
            "(`GatheredParameters`), call `save_16bit_model`, or set REFIMPL_STATE_DICT=whole and save on every rank",
            stacklevel=2,
        )
        empty = nn.Parameter(torch.empty(0, dtype=self.dtype), self.requires_grad)
        return empty.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def whole_copy(self) -> Tensor:
        return self.zero_unit.copy_of(self, "a copy of a parameter (deepcopy, pickle)")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter(sharded, shape={tuple(self.shape)}, dtype={self.dtype})"


# What may be asked of a parameter that has no values.
HARMLESS = {
    *(getattr(_TENSOR, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "grad", "grad_fn", "requires_grad", "is_leaf", "is_cuda",
        "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "_version", "names",
        "is_mps", "is_xpu", "is_mkldnn", "output_nr", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad",
    ) if hasattr(_TENSOR, name)),
    *(getattr(_TENSOR, name).__set__ for name in ("requires_grad", "grad", "_backward_hooks")),
    *(getattr(_TENSOR, name) for name in (
        "size", "numel", "nelement", "dim", "ndimension", "stride", "is_contiguous", "element_size",
        "is_floating_point", "is_complex", "is_inference", "is_signed", "register_hook",
        "register_post_accumulate_grad_hook", "requires_grad_",
        "get_device", "untyped_storage", "__len__", "__repr__", "__hash__",
    )),
    torch.is_floating_point, torch.is_complex, torch.numel, torch._has_compatible_shallow_copy_type,
    torch.full_like, torch.zeros_like, torch.ones_like, torch.empty_like,  # as Adagrad's constructor makes its state
}  # fmt: skip
CONVERSIONS = {
    Tensor.to, Tensor.type, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
}  # fmt: skip


def names_alone() -> bool:
    """What REFIMPL_STATE_DICT says; ValueError for another word."""
    wish = os.environ.get("REFIMPL_STATE_DICT", "")
    if wish not in ("", "whole", "names"):
        raise ValueError(f"REFIMPL_STATE_DICT must be whole or names, or not set, not {wish!r}")
    return wish == "names"


def unnumbered(x: Any) -> Any:
    """A CPU without its number; all else as it is."""
    return torch.device("cpu") if isinstance(x, torch.device | str) and torch.device(x).type == "cpu" else x


def spoken(func: Any) -> str:
    """What a line of a script calls it: `data`, of which `__get__` is asked, or `matmul`."""
    name: str = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def stage_of(p: nn.Parameter) -> "Stage | None":
    """The stage that looks after p, if any."""
    return getattr(p, "stage", None) if isinstance(p, Managed) else None


def raw_grad(p: nn.Parameter) -> Tensor | None:
    """The gradient that autograd has put there."""
    return GRAD.__get__(p)  # type: ignore[no-any-return]


def place(memory_of: Mapping[nn.Parameter, Tensor], kind: type[nn.Parameter]) -> None:
    """Let each of these parameters be of class `kind` and live in its memory."""
    with torch._C.DisableTorchFunctionSubclass():  # `Freed` would ask what is done with it
        for p, memory in memory_of.items():
            DATA.__set__(p, memory)
            p.__class__ = kind
