"""What travels between two stages: tensors in any nesting of tuples, lists and dictionaries, and plain values, as None.

    sender       form_of(value)  --- header: the form, once or every time --->   what to make room for
                 its tensors     --- a message each, no copy -------------->   put into the form: the value again

Gradients go the other way by the same means: a list with a tensor, or None, for each tensor that may have a gradient.
Bytes: the tensors'. A header is some hundred bytes, and is sent once a boundary and direction; with `dynamic` every
time, for shapes that change, such as the length of sequences.
DeepSpeed: deepspeed/runtime/pipe/engine.py, _send_tensor_meta (tensors and tuples of tensors; no None).
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from refimpl.comm.group import Group
from refimpl.comm.streams import told
from refimpl.comm.work import Work

T = TypeVar("T")


def each(kind: type[T], change: Callable[[T], Any], value: Any) -> Any:
    """The value with every one of that kind in it changed. Most values are one tensor, and a message costs its sender's
    and its receiver's Python: they do not go through torch's trees.
    """
    return change(value) if isinstance(value, kind) else tree_map_only(kind, change, value)


def leaves(kind: type[T], value: Any) -> list[T]:
    """Those of that kind in it."""
    return [value] if isinstance(value, kind) else [x for x in tree_leaves(value) if isinstance(x, kind)]


@dataclass(frozen=True)
class Room:
    """What one tensor needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}{' with a gradient' * self.requires_grad}"


@dataclass(frozen=True)
class Form:
    """A value with a Room in place of each tensor: equal for two values that need the same room."""

    nest: Any

    @property
    def rooms(self) -> list[Room]:
        return leaves(Room, self.nest)

    def __str__(self) -> str:
        return str(each(Room, str, self.nest))

    def fill(self, tensors: list[Tensor]) -> Any:
        """The value, with these tensors in it; each that needs a gradient is the beginning of a graph."""
        left = iter(tensors)
        return each(Room, lambda room: next(left).detach().requires_grad_(room.requires_grad), self.nest)


def form_of(value: Any) -> Form:
    return Form(each(Tensor, lambda x: Room(tuple(x.shape), x.dtype, x.requires_grad), value))


def tensors_of(value: Any) -> list[Tensor]:
    """In the order of `Form.rooms`."""
    return leaves(Tensor, value)


def with_gradient(value: Any) -> list[Tensor]:
    """The tensors that a gradient comes back for."""
    return [x for x in tensors_of(value) if x.requires_grad]


class Alias(torch.autograd.Function):
    """A leaf's memory, without the leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def writable(value: Any) -> Any:
    """The same, for layers that change what they are given, as nn.ReLU(inplace=True): a leaf autograd lets nobody."""
    return each(Tensor, lambda x: Alias.apply(x) if x.requires_grad and x.is_leaf else x, value)  # type: ignore[no-untyped-call]


class Wire:
    """One direction of one boundary between two ranks, seen from either end. It remembers the form that was agreed."""

    def __init__(self, name: str, dynamic: bool) -> None:
        """`name`: for errors and the ledger's tags. `dynamic`: every value says what it needs."""
        self.name, self.dynamic = name, dynamic
        self.form: Form | None = None

    def send(self, group: Group, value: Any, to: int) -> list[Work]:
        """Begin to send. ValueError if it needs other room than was agreed."""
        form = form_of(value)
        works = []
        if self.form is None or self.dynamic:
            header = told(list(pickle.dumps(form)), torch.uint8, group.device)
            size = told([header.numel()], torch.int64, group.device)
            works = [group.send(x, to, async_op=True, tag="pipeline headers") for x in (size, header)]
        elif form != self.form:
            raise ValueError(
                f"{self.name}: {form} is to be sent, and what was sent first was {self.form}. Shapes are agreed on "
                "once: give every micro-batch the same (dataloader_drop_last drops a short last one), build the module "
                "with dynamic=True (dynamic_shape in DeepSpeed's), or call reset_shapes(), an engine's "
                "reset_activation_shape(), on all ranks before this step"
            )
        self.form = form
        tag = f"pipeline {self.name.partition(' ')[0]}"
        sent = [x.detach().contiguous() for x in tensors_of(value)]
        return works + [group.send(x, to, async_op=True, tag=tag) for x in sent if x.numel()]

    def receive(self, group: Group, source: int) -> "Arriving":
        """Begin to receive; waits for the header where one comes."""
        if self.form is None or self.dynamic:
            size = torch.empty(1, dtype=torch.int64, device=group.device)
            group.recv(size, source, tag="pipeline headers")
            header = torch.empty(int(size.item()), dtype=torch.uint8, device=group.device)
            group.recv(header, source, tag="pipeline headers")
            self.form = pickle.loads(bytes(header.tolist()))  # from a rank of this job
        assert self.form is not None
        tag = f"pipeline {self.name.partition(' ')[0]}"
        tensors = [torch.empty(room.shape, dtype=room.dtype, device=group.device) for room in self.form.rooms]
        works = [group.recv(x, source, async_op=True, tag=tag) for x in tensors if x.numel()]
        return Arriving(self.form, tensors, works)


@dataclass
class Arriving:
    """A value on its way here."""

    form: Form
    tensors: list[Tensor]
    works: list[Work]

    def wait(self) -> Any:
        for work in self.works:
            work.wait()
        return self.form.fill(self.tensors)
