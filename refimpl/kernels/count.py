"""What a Triton kernel reads, writes and computes, counted program by program under Triton's interpreter.

    with counted() as c:
        kernel[grid](x, y, n, BLOCK=64)
    c.loaded, c.stored              # bytes, all programs; an element that two programs load counts twice
    c.loaded_from["x_ptr"]          # the same, by the kernel's argument
    c.flops, c.exps, c.operations   # of tl.dot; exponentials; elementwise and reducing operations on floats

These are the bytes that programs ask for: lanes that a mask switches off ask for none. They are what leaves the chip's
memory if no cache helps, and the docstrings' formulas are about them. With `counted(trace=True)`, `c.distinct()` is
what a perfect cache would leave of them, `c.shared(8)` what is left if 8 programs at a time share what they load, and
`c.races()` finds places that depend on the order of programs.

The interpreter (TRITON_INTERPRET=1 before the kernel is defined) runs programs one after the other in numpy, through
one builder object, whose methods are replaced while the context is open. An argument's name travels in the twelve top
bits of its pointer, which no address uses, so views that interleave and a tensor passed twice are told apart. An
address that is no element of its argument counts in `outside`; if it is in no memory of that tensor at all it is not
touched, as if the lane were masked. Not counted: what a real compiler would keep in registers,
merge or load again; instructions; time.

Source: triton/runtime/interpreter.py (Triton 3.6 and 3.7). Roofline: Williams et al. 2009, CACM 52(4).
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from refimpl.kernels.language import INTERPRETED
from refimpl.kernels.tally import Access, Counts

Addresses = npt.NDArray[np.uint64]
SHIFT = np.uint64(52)  # an argument's number stands above: no user's address of x86-64 or AArch64 comes so far
ADDRESS = np.uint64((1 << 52) - 1)
UNKNOWN = "?"  # a pointer that is no argument, such as one that was loaded from a table of pointers


@dataclass(frozen=True)
class _Argument:
    """A tensor as the kernel was given it: which addresses are its elements, and which are memory at all."""

    name: str
    base: int
    itemsize: int
    dims: tuple[tuple[int, int], ...]  # (stride, size), the widest stride first
    memory: tuple[int, int]  # offsets from base at which its storage begins and ends

    @classmethod
    def of(cls, name: str, t: Tensor) -> "_Argument":
        storage = t.untyped_storage()
        begin = storage.data_ptr() - t.data_ptr()
        dims = sorted(((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1 and s), reverse=True)
        if t.numel() == 0:
            dims = [(1, 0)]
        return cls(name, t.data_ptr(), t.itemsize, tuple(dims), (begin, begin + storage.nbytes()))

    def holds(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which offsets from the first element, in bytes, are elements of the view."""
        rest = offsets.copy()
        for stride, size in self.dims:
            step = stride * self.itemsize
            rest -= np.clip(rest // step, 0, max(size - 1, 0)) * step
        inside = (rest >= 0) & (rest < self.itemsize)
        return inside if all(size for _, size in self.dims) else np.zeros_like(inside)

    def is_memory(self, offsets: npt.NDArray[np.int64], itemsize: int) -> npt.NDArray[np.bool_]:
        return (offsets >= self.memory[0]) & (offsets + itemsize <= self.memory[1])


class _Watch:
    """Stands between the interpreter's builder and its methods, and writes into `counts`."""

    def __init__(self, module: Any, counts: Counts, trace: bool, each: Callable[[], None]) -> None:
        self.module, self.counts, self.trace, self.each = module, counts, trace, each
        self.arguments: list[_Argument] = []  # number n stands for arguments[n - 1]
        self.numbers: dict[int, int] = {}  # id of a tensor that the kernel is given -> its number
        self.program = 0

    def given(self, original: Callable[..., Any], executor: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """GridExecutor._init_args_hst: the tensors on the host, which the kernel is then given."""
        hosts, named = original(executor, args, kwargs)
        self.arguments, self.numbers = [], {}
        for name, value in [*zip(executor.arg_names, hosts, strict=False), *named.items()]:
            self._name(name, value)
        self.counts.launches += 1
        return hosts, named

    def _name(self, name: str, value: Any) -> None:
        if isinstance(value, tuple):
            for i, part in enumerate(value):
                self._name(f"{name}[{i}]", part)
        elif isinstance(value, self.module.TensorDescriptor):
            self._name(name, value.base)
        elif hasattr(value, "data_ptr"):
            self.arguments.append(_Argument.of(name, getattr(value, "base", value)))
            self.numbers[id(value)] = len(self.arguments)

    def converted(self, original: Callable[[Any], Any], arg: Any) -> Any:
        """_implicit_cvt: a tensor becomes a pointer, which gets its argument's number."""
        result = original(arg)
        if number := self.numbers.get(id(arg)):
            result.handle.data = result.handle.data | np.uint64(number) << SHIFT
        return result

    def started(self, original: Callable[..., None], x: int, y: int, z: int) -> None:
        nx, ny, _ = self.module.interpreter_builder.grid_dim
        self.program = x + nx * (y + ny * z)
        self.counts.programs += 1
        self.each()
        original(x, y, z)

    def access(self, kind: str, pointers: Any, mask: Any) -> tuple[Any, Any]:
        """Count it; the handles to go on with: pointers without numbers, a mask without what is no memory."""
        lanes, on = np.broadcast_arrays(pointers.data, np.asarray(mask.data))
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        allowed = on.astype(bool)
        for number in np.unique(lanes[allowed] >> SHIFT).tolist():
            here = allowed & (lanes >> SHIFT == number)
            name, offsets = self._count(number, lanes[here] & ADDRESS, itemsize, kind)
            if number:
                allowed[here] = self.arguments[number - 1].is_memory(offsets, itemsize)
            if self.trace:
                base = self.arguments[number - 1].base if number else 0
                made = Access(self.counts.launches, self.program, kind, name, base, offsets, itemsize)
                self.counts.accesses.append(made)
        handle = self.module.TensorHandle
        return handle(pointers.data & ADDRESS, pointers.dtype), handle(allowed, self.module.tl.int1)

    def _count(self, number: int, addresses: Addresses, itemsize: int, kind: str) -> tuple[str, npt.NDArray[np.int64]]:
        offsets = addresses.astype(np.int64)
        name = UNKNOWN
        if number:
            argument = self.arguments[number - 1]
            name, offsets = argument.name, offsets - argument.base
            self.counts.outside[name] += int((~argument.holds(offsets)).sum()) * itemsize
            self.counts.outside = +self.counts.outside
        if kind != "store":
            self.counts.loaded_from[name] += len(offsets) * itemsize
        if kind != "load":
            self.counts.stored_to[name] += len(offsets) * itemsize
        return name, offsets

    def load(self, original: Callable[..., Any], pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return original(*self.access("load", pointers, mask), *rest, **named)

    def store(self, original: Callable[..., Any], pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        pointers, mask = self.access("store", pointers, mask)
        return original(pointers, value, mask, *rest)

    def atomic(self, original: Callable[..., Any], op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        pointers, mask = self.access("atomic", pointers, mask)
        return original(op, pointers, value, mask, *rest)

    def compare(self, original: Callable[..., Any], pointers: Any, *rest: Any) -> Any:
        everywhere = self.module.TensorHandle(np.ones(pointers.data.shape, dtype=bool), self.module.tl.int1)
        return original(self.access("atomic", pointers, everywhere)[0], *rest)

    def dot(self, original: Callable[..., Any], a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        flops = 2 * d.data.size * a.data.shape[-1]
        self.counts.flops += flops
        self.counts.tf32 += flops * (a.dtype.scalar.is_fp32() and precision.name != "IEEE")
        return original(a, b, d, precision, *rest)

    def elementwise(self, original: Callable[..., Any], arg: Any, *rest: Any) -> Any:
        result = original(arg, *rest)
        if arg.dtype.scalar.is_floating():
            self.counts.operations += result.data.size
            self.counts.exps += result.data.size * (rest[-1] in (np.exp, np.exp2))
        return result

    def multiply_add(self, original: Callable[..., Any], *args: Any) -> Any:
        result = original(*args)
        self.counts.operations += 2 * result.data.size
        return result

    def reduced(self, original: Callable[..., Any], how: Any, inputs: Any) -> Any:
        """ReduceOps.apply_impl: the tensors it reduces, of which the first holds the values."""
        if inputs[0].dtype.is_floating():
            self.counts.operations += inputs[0].handle.data.size
        return original(how, inputs)

    def made(self, original: Callable[..., None], handle: Any) -> None:
        """TensorHandle.__post_init__: a block that the program now has."""
        if not isinstance(handle.dtype, self.module.tl.pointer_type):
            self.counts.largest_block = max(self.counts.largest_block, handle.data.size)
        original(handle)

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """(object, attribute, what stands before its original)."""
        module, builder = self.module, self.module.interpreter_builder
        yield module.GridExecutor, "_init_args_hst", self.given
        yield module, "_implicit_cvt", self.converted
        yield module.TensorHandle, "__post_init__", self.made
        yield module.ReduceOps, "apply_impl", self.reduced
        methods: dict[str, Callable[..., Any]] = {
            "set_grid_idx": self.started,
            "create_masked_load": self.load,
            "create_masked_store": self.store,
            "create_atomic_rmw": self.atomic,
            "create_atomic_cas": self.compare,
            "create_dot": self.dot,
            "binary_op": self.elementwise,
            "unary_op": self.elementwise,
            "create_fma": self.multiply_add,
        }
        for name, method in methods.items():
            yield builder, name, method


@contextmanager
def counted(trace: bool = False, each: Callable[[], None] = lambda: None) -> Iterator[Counts]:
    """Count what the kernels do that are launched inside. `trace` keeps every access (8 bytes a lane).

    `each` is called before each program: the interpreter is slow, and whoever waits may want a sign of life.
    RuntimeError outside the interpreter, where nothing could be seen, and inside another `counted()`.
    """
    if not INTERPRETED:
        raise RuntimeError(
            "counted() sees kernels under Triton's interpreter alone: set TRITON_INTERPRET=1 in the environment before "
            "triton, or anything of refimpl.kernels, is imported"
        )
    module = importlib.import_module("triton.runtime.interpreter")
    if "create_dot" in vars(module.interpreter_builder):
        raise RuntimeError("counted() inside counted(): one count at a time")
    counts = Counts()
    with ExitStack() as stack:
        for place, name, method in _Watch(module, counts, trace, each).replacements():
            stack.callback(_replace(place, name, method))
        yield counts


def _replace(place: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Put `method`, which is handed the original first, before place.name. The function that takes it away again."""
    own, original = name in vars(place), getattr(place, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    setattr(place, name, instead)

    def undo() -> None:
        if own:
            setattr(place, name, original)
        else:
            delattr(place, name)

    return undo
