"""The memory meter: live bytes by class (parameters, gradients, optimizer, ..., activations), read from storages.

A tensor is a view; what holds memory is its storage. The meter adds up storages, each once and whole, so that a
parameter that is a slice of a flat buffer, a tied weight, or a shard that aliases the buffer it updates is never
counted twice. Whoever owns memory names its tensors, class by class: `MemoryMeter(stage.tensors)`. A storage belongs
to the first class that claims it. A storage that was given back by `untyped_storage().resize_(0)` counts 0.

What nobody owns has to be watched being made: inside `with meter:` a TorchDispatchMode sees every operation, keeps a
weak reference to the storage of each result, and counts all classes anew. Storages in no class are

    activations   made in a forward pass: with gradients enabled, or inside any module's forward
    other         the rest: gradients of activations, receive buffers, temporaries of the optimizer

The peaks are exact between operations. An operation's own workspace is not seen, nor is a tensor made before
`with meter:` that no class names, until an operation returns a view of it (the input batch): `cross_check` compares
with what the system says. Counting walks all live storages at every operation, which doubles the step time of a model
with 50 parameters. For a large one leave `with meter:` out and call `sample` where it matters.
torch's own meter of this kind: torch/distributed/_tools/mem_tracker.py. DeepSpeed's counterpart: `see_memory_usage`.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    import pandas as pd

Classes = Callable[[], Mapping[str, Iterable[Tensor]]]


class MemoryMeter:
    """Bytes now and at the peak, by class. All numbers are bytes of this process, host and device together.

    peak: each class's own highest value. at_peak: all classes at the moment when their total was highest.
    """

    def __init__(self, classes: Classes) -> None:
        """`classes` is called at every count and names the tensors owned at that moment, class by class."""
        self.classes = classes
        self.peak: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}
        # Weak: the meter must not keep alive what it measures.
        self._activations: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        self._other: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        self._watch = _Watch(self._made)

    def now(self) -> dict[str, int]:
        """Live bytes of every class, then of activations and other (known only if made in `with meter:`)."""
        seen: set[UntypedStorage] = set()
        claims = {name: [t.untyped_storage() for t in tensors] for name, tensors in self.classes().items()}
        claims |= {"activations": list(self._activations), "other": list(self._other)}
        return {name: _fresh_bytes(storages, seen) for name, storages in claims.items()}

    def sample(self) -> dict[str, int]:
        """`now()`, and raise the peaks to it."""
        sizes = self.now()
        self.peak = {name: max(size, self.peak.get(name, 0)) for name, size in sizes.items()}
        if sum(sizes.values()) > sum(self.at_peak.values()):
            self.at_peak = sizes
        return sizes

    def reset_peak(self) -> None:
        """Forget the peaks: the next sample starts them anew."""
        self.peak, self.at_peak = {}, {}

    def _made(self, result: object, forward: bool) -> None:
        made = self._activations if forward else self._other
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # A view or an in-place result: the storage stays what it was when it was made.
                if storage not in self._activations and storage not in self._other:
                    made.add(storage)
        self.sample()

    def __enter__(self) -> "MemoryMeter":
        self._watch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._watch.__exit__(*error)
        self.sample()  # the last gradient is accumulated after the last operation

    def cross_check(self) -> dict[str, int]:
        """The meter's total beside what the system says, in bytes: compare the growth of each between two calls.

        counted: sum of `now()`. resident: this process's own pages in host memory, with the interpreter and free heap.
        Only where CUDA is in use, of the current device: cuda_allocated, cuda_peak: torch's allocator, now and at its
        highest so far, in blocks of 512 bytes; cuda_used: the driver's count, of all processes, with NCCL's buffers,
        each context and what the allocator keeps.
        """
        check = {"counted": sum(self.now().values()), "resident": _resident()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            check["cuda_allocated"] = torch.cuda.memory_allocated()
            check["cuda_peak"] = torch.cuda.max_memory_allocated()
            free, whole = torch.cuda.mem_get_info()
            check["cuda_used"] = whole - free
        return check

    def table(self) -> "pd.DataFrame":
        """One row a class: now, peak (its own), at_peak (when the total was highest), in bytes."""
        import pandas as pd

        columns = {"now": self.now(), "peak": self.peak, "at_peak": self.at_peak}
        table = pd.DataFrame({name: pd.Series(sizes, dtype="int64") for name, sizes in columns.items()})
        return table.reindex(list(columns["now"])).fillna(0).astype("int64").rename_axis("class")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `made` of every operation's result, and whether a forward pass made it."""

    def __init__(self, made: Callable[[object, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made
        self._depth = 0  # of modules whose forward is running
        self._hooks: list[list[Any]] = []  # of each `with` that is open

    def __enter__(self) -> "_Watch":
        # Gradients enabled is not the whole of forward: an autograd.Function, a reentrant checkpoint and evaluation
        # compute with gradients disabled, inside some module's forward.
        self._hooks.append(
            [
                register_module_forward_pre_hook(lambda *_: self._enter_module(+1)),
                register_module_forward_hook(lambda *_: self._enter_module(-1), always_call=True),
            ]
        )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks.pop():
            hook.remove()
        if not self._hooks:
            self._depth = 0

    def _enter_module(self, by: int) -> None:
        self._depth += by

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made(result, self._depth > 0 or torch.is_grad_enabled())
        return result


def _fresh_bytes(storages: Iterable[UntypedStorage], seen: set[UntypedStorage]) -> int:
    """Bytes of the storages not seen before, which are then seen."""
    fresh = set(storages) - seen
    seen |= fresh
    return sum(storage.nbytes() for storage in fresh)


def _resident() -> int:
    """RSS in bytes; on Linux less the pages of files, such as code, which the system takes and brings by itself."""
    if sys.platform == "linux":
        rows = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
        return 1024 * sum(int(rows[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    import psutil

    return psutil.Process().memory_info().rss
