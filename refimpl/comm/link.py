"""A link that is slow, for real: bandwidth and latency between the nodes of a job, on one machine and without root.

A cable leads from each node to each other one, one way. All ranks of the node share it, whatever group they speak in:

    a message of n bytes    is on the cable from max(now, when it is free) on, for n / bandwidth
                            arrives when its last byte has left, and latency later
    its sender              waits until it has left
    its receiver            waits until it has arrived

That is a token bucket of depth 0: in no interval does a cable carry more than its bandwidth, and it is never idle while
messages wait. The bytes themselves go another way, in memory or through gloo, and are there before; what is slow is
when a rank may have them. A rank that waits sleeps, so others compute. A message is on its way from the moment it is
sent, so what its sender does after that goes on within the latency; what a receiver takes to come back from waiting,
some tens of microseconds, is measured, and the least of its last returns taken off. What a message takes by itself, 30
to 280 us between two processes here, is a floor: no link is faster than that. Instants are those of the machine's
monotonic clock, which all its processes share, as they share the file that says when a cable is free.

    REFIMPL_LINK="1Gbit/s 100us" REFIMPL_RANKS_PER_NODE=2   four ranks, two nodes; without the second every rank is one
    Group.world(link=Link(1e9, 100e-6)), group.throttled(Link(1e9, 100e-6, pairs=((0, 2),)))
"""

import fcntl
import math
import mmap
import os
import re
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from refimpl.comm.nodes import ranks_per_node
from refimpl.ranks import here
from refimpl.ranks.here import host

VARIABLE = "REFIMPL_LINK"
LONGEST, LEARNT = 100_000, 4  # ns of a way back from waiting that counts; so many last ones are remembered
KEPT = 4096  # messages between two ranks whose arrival is known; of older ones only that they are not later
COLLECTIVE, MESSAGE = 0, 1  # what a receiver meets in the order in which it was sent, each for itself
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)"
_TEXT = re.compile(
    rf"\s*{_NUMBER}\s*([kKmMgGtT]?)(bit/s|bit|bps|b/s|B/s)(?:[\s,]+{_NUMBER}\s*({'|'.join(_SECONDS)}))?\s*"
)


@dataclass(frozen=True)
class Link:
    """`latency` in seconds. `pairs`: it lies between these ranks of the job, both ways, each with cables of its own.

    Without pairs it lies between nodes; where all ranks are one node, between any two ranks.
    """

    bits_per_second: float
    latency: float = 0.0
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """ValueError for a bandwidth that is not above 0, a latency below 0, a pair of one rank."""
        if not self.bits_per_second > 0 or not 0 <= self.latency < math.inf:
            raise ValueError(f"a link needs a bandwidth above 0 and a latency of 0 or more, not {self}")
        if any(len(set(pair)) != 2 or min(pair) < 0 for pair in self.pairs):
            raise ValueError(f"a link's pairs are of two different ranks, such as ((0, 2), (1, 3)), not {self.pairs}")

    @classmethod
    def parse(cls, text: str, name: str = "link") -> "Link":
        """ "1Gbit/s 100us", "100 Mbit/s, 2 ms", "125MB/s". ValueError, which begins with `name`, for anything else."""
        found = _TEXT.fullmatch(text)
        if found:
            number, prefix, unit, latency, seconds = found.groups()
            bits = float(number) * _SCALE[prefix.lower()] * (8 if unit == "B/s" else 1)
            late = float(latency) * _SECONDS[seconds] if latency else 0.0
            if 0 < bits < math.inf and late < math.inf:
                return cls(bits, late)
        raise ValueError(
            f'{name}={text!r} is no link: write a bandwidth and a latency, such as {name}="1Gbit/s 100us" (bit/s or '
            "B/s with k, M, G or T before it; s, ms, us or ns)"
        )

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> "Link | None":
        """What REFIMPL_LINK says; None if it is not set. ValueError as `parse`."""
        said = environ.get(VARIABLE, "")
        return cls.parse(said, VARIABLE) if said.strip() else None

    def cable(self, sender: int, receiver: int, world_size: int) -> int | None:
        """The number of the cable that leads from one rank of the job to another; None if they are near."""
        if self.pairs:
            linked = any({sender, receiver} == set(pair) for pair in self.pairs)
            return sender * world_size + receiver if linked else None
        near = ranks_per_node(world_size)
        a, b = (rank // (near if near < world_size else 1) for rank in (sender, receiver))
        return None if a == b else a * world_size + b


class Cables:
    """The cables of a link that begin or end at this rank, as far as they lead to other ranks of the group `handle`."""

    def __init__(self, link: Link, handle: dist.ProcessGroup) -> None:
        """ValueError for pairs of ranks that there are not, RuntimeError if the ranks are on several machines."""
        size, self.members, self.me = dist.get_world_size(), handle.size(), handle.rank()
        if any(max(pair) >= size for pair in link.pairs):
            raise ValueError(f"the link's pairs {link.pairs} name ranks beyond those of the job, 0 to {size - 1}")
        ranks = dist.get_process_group_ranks(handle)
        cables = {
            (a, b): cable
            for a, sender in enumerate(ranks)
            for b, receiver in enumerate(ranks)
            if a != b and (cable := link.cable(sender, receiver, size)) is not None
        }
        self.apart = bool(cables)  # whether any two ranks of the group are
        self._to = {b: cable for (a, b), cable in cables.items() if a == self.me}
        self._from = {a for a, b in cables if b == self.me}
        self._ns_per_byte, self._latency = 8e9 / link.bits_per_second, round(link.latency * 1e9)
        self.crossed = 0  # bytes that this rank has sent over cables
        self._late = deque([0], LEARNT)  # ns from when a rank stopped waiting for a message to when its caller went on
        self._waited = 0  # when the call under way stopped, or was to stop, waiting; 0: it has not waited
        if self.apart:
            where, name = _folder(), f"{link.bits_per_second:g}-{link.latency:g}"
            self._free = Words(where / f"cables-{name}", size * size)  # per cable: when it is free, in ns
            group = handle.group_name.replace("/", "-")  # ours have slashes: see `process_group._named`
            self._stamps = Words(where / f"stamps-{group}", self.members**2 * 2 * (2 + KEPT))

    def send(self, kind: int, sizes: Mapping[int, int], now: int) -> int:
        """Put messages of so many bytes to these members on their cables `now`. Returns when the last has left, in ns.

        Before their bytes can be read: a receiver that has these finds when they arrive.
        """
        far = [(peer, size) for peer, size in sizes.items() if size and peer in self._to]
        left = 0
        if far:
            with self._free:
                for peer, size in far:
                    cable = self._to[peer]
                    left = max(now, self._free[cable]) + round(size * self._ns_per_byte)
                    self._free[cable] = left
                    self._stamps[self._next(kind, self.me, peer, received=False)] = left + self._latency
                    self.crossed += size
        return left

    def expect(self, kind: int, sizes: Mapping[int, int]) -> list[int]:
        """The words in which stands when the next messages from these members arrive, once their bytes are here."""
        far = [peer for peer, size in sizes.items() if size and peer in self._from]
        return [self._next(kind, peer, self.me, received=True) for peer in far]

    def due(self, words: list[int]) -> int:
        """When to stop waiting for the last of these, in ns: for a receiver that has it when it arrives.

        What its caller's way back takes at least is taken off the latency, and no more than the latency.
        """
        arrives = max((self._stamps[word] for word in words), default=0)
        return arrives - min(*self._late, self._latency)

    def waited(self, until: int) -> None:
        """Somebody waited, or should have waited, until then."""
        self._waited = until

    def returned(self) -> None:
        """A call is over: learn how long its way back was."""
        if self._waited:
            self._late.append(min(time.monotonic_ns() - self._waited, LONGEST))
            self._waited = 0

    def _next(self, kind: int, sender: int, receiver: int, received: bool) -> int:
        """The word of the next message between two members: each of them counts for itself."""
        begin = ((sender * self.members + receiver) * 2 + kind) * (2 + KEPT)
        number = self._stamps[begin + received]
        self._stamps[begin + received] = number + 1
        return begin + 2 + number % KEPT


class Words:
    """A file of 64-bit integers, 0 at first, that a machine's processes map. `with` it: nobody else is in there."""

    def __init__(self, path: Path, count: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # whoever comes first makes it
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, 8 * count)
        self._words = memoryview(mmap.mmap(self._file, 8 * count)).cast("q")

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)  # the kernel gives it back when its holder dies

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def _folder() -> Path:
    """Where the ranks of this job keep what they share about cables. RuntimeError if they are on several machines."""
    store: Any = distributed_c10d._get_default_store()
    if store.add("refimpl/link/asked", 1) == 1:
        store.set("refimpl/link/on", host())
    where = here.of_job() or here.agreed()
    if where is None or store.get("refimpl/link/on").decode() != host():
        raise RuntimeError(f"{VARIABLE} plays several nodes on one machine, and these ranks are on several: unset it")
    return where
