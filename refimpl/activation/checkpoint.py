"""Activation checkpointing: keep a function's inputs, drop what autograd would save, and compute it again in backward.

    forward    fn runs; each tensor that autograd would save becomes a `Slot`, which holds nothing
    backward   the first slot that is asked for its tensor runs fn once more (`Frame.recompute`), which fills the slots;
               each then gives its tensor away once. The run ends as soon as the last slot still needed is filled.

Memory: what one call keeps is its tensor arguments and 5,056 bytes of random state; in backward, on top, what one fn
saves. Time: one more forward of fn, of training's three units (backward takes two) a third more. Traffic: none, but
under ZeRO-3 the parameters that the second run needs are gathered for backward anyway.

The two ways to build it. An `autograd.Function` that runs fn without gradients, and in backward again with them, is
shortest (chapter 07 builds it); it needs an input that requires a gradient, returns no gradient to a tensor hidden in
a list, cannot serve `torch.autograd.grad`, and must run fn to its end. An argument that fn uses twice gets the sum of
both gradients at once, where the plain run adds them one by one to those of later blocks: the same sum in another
order, with other last bits (T5's encoder output, which each decoder layer takes for keys and values). This one lets
autograd record the graph once, in forward, and replaces only what it saves
(`torch.autograd.graph.saved_tensors_hooks`), so outputs, hooks, partial backwards, `create_graph`, closures and
keyword arguments are the plain run's own. An autograd.Function is left where it does best: `Inputs` keeps the
arguments, so that they are checked for in-place changes, and so that inside another checkpoint they become slots
themselves. Nesting follows from that.

Chen et al. 2016, arXiv:1604.06174. torch: torch/utils/checkpoint.py, `use_reentrant=False`; there a second access to
one saved tensor is an error, here it runs fn again, and there fn runs until everything is recomputed, not only what is
needed. DeepSpeed: deepspeed/runtime/activation_checkpointing/checkpointing.py, of the first kind.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from refimpl.activation.home import Home
from refimpl.activation.policy import Policy, Results
from refimpl.activation.state import State, Tracker

T = TypeVar("T")
Run = Literal["forward", "backward"]
Meta = tuple[torch.Size, torch.dtype, torch.device]


class CheckpointError(RuntimeError):
    """The second run of a function did not do what the first one did."""


@dataclass(frozen=True)
class Checkpoint:
    """How to checkpoint; calling it does so. `Checkpoint()(fn, *args, **kwargs)` is `checkpoint(fn, *args, **kwargs)`.

    home: where floating-point arguments are kept meanwhile. policy: operations whose results are kept, see `policy.py`.
    random: whether a second run draws the same random numbers; trackers: generators beside torch's own.
    early_stop: whether a second run ends when nothing more is needed. around: a context for each run of fn.
    """

    home: Home | None = None
    policy: Policy | None = None
    random: bool = True
    trackers: tuple[Tracker, ...] = ()
    early_stop: bool = True
    around: Callable[[Run], AbstractContextManager[object]] = lambda run: nullcontext()

    def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """fn(*args, **kwargs), of which autograd keeps nothing but the arguments. Without gradients: just that."""
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        frame = Frame(self, fn, args, kwargs)
        with self.around("forward"), saved_tensors_hooks(frame.pack, frame.unpack), frame.results.kept(), as_written():
            return fn(*args, **kwargs)


def checkpoint(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """fn(*args, **kwargs), computed again in backward instead of kept. Gradients: the plain call's, bit for bit.

    fn must compute the same when it runs again: what it reads beside its arguments must not have changed. What it
    writes beside its result, such as the running statistics of a batch norm, it writes twice. It may take and return
    anything; tensors inside lists, tuples and dictionaries are kept as arguments are. CheckpointError when the second
    run saves other tensors than the first; RuntimeError when an argument was changed in place meanwhile.
    """
    return Checkpoint()(fn, *args, **kwargs)


class Slot:
    """What autograd keeps in place of one tensor. It has the tensor from the second run until it is asked for."""

    def __init__(self, frame: "Frame", meta: Meta) -> None:
        self.frame, self.meta = frame, meta
        self.value: Tensor | None = None


class Frame:
    """One checkpointed call. It lives as long as a slot of it does: autograd lets go of both as backward proceeds."""

    def __init__(self, how: Checkpoint, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.how, self.fn = how, fn
        leaves, self.tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.where = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        # Inside another checkpoint's run the arguments are computed again themselves: nothing is sent home.
        self.inputs = Inputs(tensors, None if recording() else how.home)
        self.state = State.now(tensors, how.random, how.trackers)
        self.results = Results(how.policy)
        self.slots: list[weakref.ref[Slot]] = []  # in the order in which fn saves

    def pack(self, tensor: Tensor) -> Slot:
        slot = Slot(self, meta(tensor))
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: Slot) -> Tensor:
        if slot.value is None:
            self.recompute()
        value, slot.value = slot.value, None
        assert value is not None
        return value

    def recompute(self) -> None:
        """Run fn again and fill every slot that is empty and still wanted."""
        wanted = {place: slot for place, ref in enumerate(self.slots) if (slot := ref()) and slot.value is None}
        again = Again(wanted, stop=self.how.early_stop)
        leaves = list(self.rest)
        for place, tensor in zip(self.where, self.inputs.get(), strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        del leaves
        with self.how.around("backward"), self.state.again(), torch.enable_grad():
            try:
                with saved_tensors_hooks(again.pack, again.unpack), self.results.used(), as_written():
                    self.fn(*args, **kwargs)
            except Exception:  # Enough; TorchScript makes a RuntimeError of it that knows no more
                if not again.ended:
                    raise
        if wanted:
            raise CheckpointError(
                f"{name_of(self.fn)} saved {len(self.slots)} tensors when it ran first, {again.seen} when it ran again "
                "for backward: it took another way. It must do the same in both runs, whatever else has changed since"
            )


class Again:
    """The second run: what it saves goes into the slots that are waiting, by place."""

    def __init__(self, wanted: dict[int, Slot], stop: bool) -> None:
        self.wanted, self.stop, self.seen = wanted, stop, 0
        self.ended = False

    def pack(self, tensor: Tensor) -> Tensor:
        slot = self.wanted.pop(self.seen, None)
        if slot is not None:
            if meta(tensor) != slot.meta:
                raise CheckpointError(
                    f"{name_of(slot.frame.fn)}: saved tensor number {self.seen} was {words(slot.meta)} when it ran "
                    f"first, and is {words(meta(tensor))} when it runs again for backward: it took another way"
                )
            slot.value = tensor.detach() if tensor.requires_grad else tensor  # a constant is given back as it is
        self.seen += 1
        self.ended = self.stop and not self.wanted
        if self.ended:
            raise Enough
        return tensor.detach()  # a backward inside fn goes through this run's own graph

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


class Enough(Exception):
    """Ends a second run. An Exception and no BaseException: modules run their forward hooks only then."""


class Inputs:
    """The tensor arguments of one call, kept for a second run: at `home`, or by autograd itself."""

    def __init__(self, tensors: list[Tensor], home: Home | None) -> None:
        self.home = home
        self.wants_grad = [t.requires_grad for t in tensors]
        self.sent: dict[int, tuple[Any, list[int]]] = {}  # and the order of its dimensions in memory
        for place, tensor in enumerate(tensors):
            if home is not None and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter):
                order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
                packed = home.put(tensor.detach().permute(order), place)
                if packed is not None:
                    self.sent[place] = packed, order
        stay = [t for place, t in enumerate(tensors) if place not in self.sent]
        # The empty result, not its node: before torch 2.13 a node of Python's is freed with what it has made.
        self.saver = Saver.apply(torch.empty(0, requires_grad=True), *stay) if stay else None  # type: ignore[no-untyped-call]

    def get(self) -> list[Tensor]:
        """The same tensors, laid out as they were, each the beginning of a graph of its own."""
        stay = iter(self.saver.grad_fn.saved_tensors if self.saver is not None else ())
        tensors = [self.back(i) if i in self.sent else next(stay) for i in range(len(self.wants_grad))]
        return [t.detach().requires_grad_(w) for t, w in zip(tensors, self.wants_grad, strict=True)]

    def back(self, place: int) -> Tensor:
        """What was sent home, as the first run had it: that may have been a `view` that only its strides allow."""
        assert self.home is not None
        packed, order = self.sent[place]
        return self.home.get(packed).permute([order.index(i) for i in range(len(order))])


class Saver(torch.autograd.Function):
    """Computes nothing; its node keeps tensors the way autograd does."""

    generate_vmap_rule = True  # torch.func's transforms pass by

    @staticmethod
    def forward(nothing: Tensor, *tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nobody has this function's output")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return torch.empty(0)  # forward-mode differentiation passes by


def recording() -> bool:
    """Whether a checkpointed function is running, for the first or the second time."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    owner = getattr(top[0], "__self__", None) if top else None
    while (around := getattr(owner, "pack_around", None)) is not None:  # ZeRO-3's, which hand on to those around them
        owner = getattr(around, "__self__", None)
    return isinstance(owner, Frame | Again)


def as_written() -> AbstractContextManager[None]:
    """TorchScript runs as it is written: after its first call it may save other tensors, for it has then optimised."""
    return torch.jit.optimized_execution(False)  # type: ignore[attr-defined]


def meta(tensor: Tensor) -> Meta:
    return tensor.shape, tensor.dtype, tensor.device


def words(what: Meta) -> str:
    shape, dtype, device = what
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"


def name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)
