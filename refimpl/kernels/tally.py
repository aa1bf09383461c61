"""What a count of a kernel holds: bytes by argument, operations, and what can be asked of every single access.

refimpl.kernels.count makes it, and says what is counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Access:
    """One load, store or atomic operation of one program: where in its argument, in bytes from the first element."""

    launch: int
    program: int  # in the order in which hardware starts them: axis 0 fastest
    kind: str  # "load", "store" or "atomic"
    argument: str
    base: int  # address of the argument's first element
    offsets: npt.NDArray[np.int64]  # of the lanes that are on
    itemsize: int


@dataclass
class Counts:
    """Everything since the context was entered, over all kernels that ran in it. Bytes, operations, programs."""

    loaded_from: Counter[str] = field(default_factory=Counter)  # argument -> bytes
    stored_to: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)  # bytes at addresses that are no element of the argument
    flops: int = 0  # of tl.dot: 2 M N K
    tf32: int = 0  # those of fp32 tiles that a GPU would round to TF32's 10 bits; the interpreter does not
    operations: int = 0  # elementwise on floats, one a lane, masked lanes too; a reduction has one for each input
    exps: int = 0  # exp and exp2, counted among the operations too
    programs: int = 0
    launches: int = 0
    largest_block: int = 0  # elements of the largest block that a program held, pointers left out
    accesses: list[Access] = field(default_factory=list)  # with `counted(trace=True)`

    @property
    def loaded(self) -> int:
        """Bytes that all programs loaded; an atomic operation loads and stores."""
        return self.loaded_from.total()

    @property
    def stored(self) -> int:
        """Bytes that all programs stored."""
        return self.stored_to.total()

    def distinct(self) -> Counter[str]:
        """Argument -> bytes that were loaded at least once: what a perfect cache would load. Needs the trace."""
        return _distinct(self._loads(), None)

    def shared(self, programs: int) -> Counter[str]:
        """The same if `programs` neighbours run at once and share what they load, then the next. Needs the trace."""
        return _distinct(self._loads(), programs)

    def sectors(self, size: int = 32) -> Counter[str]:
        """Argument -> bytes of the sectors of memory that its loads and stores touch, each by itself. Needs the trace.

        A sector is what memory moves at least: 32 bytes on NVIDIA's. Lanes of one access that fall into the same sector
        share it; this is coalescing, of whole blocks.
        """
        found: Counter[str] = Counter()
        for a in self.accesses:
            found[a.argument] += len(np.unique((a.base + a.offsets) // size)) * size
        return found

    def races(self) -> Counter[str]:
        """Argument -> places to which one program stores while another stores or loads there. Needs the trace.

        Programs of one launch run in any order, so what is in such a place is chance. Atomic operations race with plain
        ones, not with each other. What a lock of the kernel's own puts in order is reported too.
        """
        users: dict[tuple[int, int], set[tuple[int, str]]] = {}
        owner: dict[tuple[int, int], str] = {}
        for a in self.accesses:
            for place in (a.base + a.offsets).tolist():
                users.setdefault((a.launch, place), set()).add((a.program, a.kind))
                if a.kind == "store":
                    owner[a.launch, place] = a.argument
        return Counter(owner[p] for p in owner if len({program for program, _ in users[p]}) > 1)

    def _loads(self) -> list[Access]:
        return [a for a in self.accesses if a.kind != "store"]


def _distinct(accesses: Sequence[Access], programs: int | None) -> Counter[str]:
    """Bytes by argument, each place once in every launch, or in every group of so many neighbours."""
    groups: dict[tuple[int, int, str], list[Access]] = {}
    for a in accesses:
        groups.setdefault((a.launch, a.program // programs if programs else 0, a.argument), []).append(a)
    found: Counter[str] = Counter()
    for (_, _, argument), group in groups.items():
        places = np.unique(np.concatenate([a.offsets for a in group]))
        found[argument] += len(places) * group[0].itemsize
    return found
