"""Which transport a group's bytes take: its collectives, and its messages between two ranks.

    NCCL                            the library's own, or composed of its messages where the order of a sum is asked for
    tensors on the CPU, one host    shared memory; that all ranks are on one is found out at the first collective
    tensors on the CPU, several     composed of gloo's
    a slow link between any         the same, throttled

REFIMPL_TRANSPORT=gloo or shared says otherwise for tensors on the CPU.

gloo's all-reduce is two transfers with additions between them. Where nobody waits for it a thread adds, and starts the
second (see `behind.py`), in a process group beside it: calls of one group are matched by their order.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.comm.behind import Behind, behind
from refimpl.comm.collectives import Op
from refimpl.comm.composed import Composed
from refimpl.comm.link import Cables, Link
from refimpl.comm.mapped import Own, of_peer
from refimpl.comm.native import Native
from refimpl.comm.objects import to_everyone
from refimpl.comm.process_group import beside
from refimpl.comm.shared import Shared
from refimpl.comm.signals import all_words, unsupported
from refimpl.comm.streams import Streams
from refimpl.comm.throttled import Throttled
from refimpl.comm.transport import Alone, Library, Transport
from refimpl.comm.work import Phase, Steps
from refimpl.ranks.here import host
from refimpl.ranks.travel import dumps, loads

ELSEWHERE = "its ranks are on several hosts"


class Route:
    """Of one group. `direct` is there without asking the other ranks; `messages` is the way between two of them."""

    def __init__(
        self,
        handle: dist.ProcessGroup | None,
        backend: str,
        device: torch.device,
        streams: Streams,
        deterministic: bool,
        transport: Transport | str | None,
        link: Link | None,
    ) -> None:
        """The arguments are `Group`'s, which says what it raises."""
        self.backend, self.streams = backend, streams
        # Starts the second half of all-reduces that nobody waits for.
        self._behind = Behind() if handle is None else behind(handle.group_name)
        self._of = partial(Route, backend=backend, device=device, streams=streams, deterministic=deterministic)
        self._second: Route | None = None  # the thread's, over a process group beside; made when it is needed
        self._crossed = 0  # bytes of second halves over cables, of all-reduces that are over, not yet told
        wish = os.environ.get("REFIMPL_TRANSPORT", "") if transport is None else transport
        self.link = link or (None if isinstance(wish, Transport) else Link.of_environment())
        self.cables = self._laid(handle)
        self.direct = wish if isinstance(wish, Transport) else self._library(handle, wish, deterministic)
        size = self.direct.size
        may_share = backend == "gloo" and device.type == "cpu" and size > 1
        if wish == "shared" and not may_share and handle is not None and size > 1:
            raise RuntimeError(
                f"REFIMPL_TRANSPORT=shared, but this group cannot share memory: its tensors are on {device.type}, its "
                f"backend is {backend}; unset it"
            )
        self._must_share = wish == "shared"
        self.met = None if may_share and wish in ("", "shared") else self.direct  # None: not found out yet
        self.messages: Transport = self.direct

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """torch's group; None in a group of one without it."""
        return self.direct.handle if isinstance(self.direct, Library) else None

    @property
    def present(self) -> Transport:
        """The way of the collectives as far as it is known without asking the other ranks."""
        return self.met or self.direct

    @property
    def collectives(self) -> Transport:
        """The way of the collectives. Where it may be shared memory, asking for it first is a collective."""
        if self.met is None:
            assert self.handle is not None
            shared = meet(self.handle)
            if isinstance(shared, Transport):
                self.met = self._throttled(shared)
            elif self._must_share:
                raise RuntimeError(f"REFIMPL_TRANSPORT=shared, but this group cannot share memory: {shared}; unset it")
            else:
                if self.handle.rank() == 0 and shared not in (ELSEWHERE, unsupported()):
                    warnings.warn(f"ranks of this host speak gloo, slower than shared memory: {shared}", stacklevel=3)
                self.met = self.direct
        return self.met

    def unattended(self, x: Tensor, op: Op, meet: Callable[[], None]) -> Steps:
        """An all-reduce that goes on by itself, where it is `in_halves`. `meet` returns when all ranks have come."""
        first, under_way, crossed = self.direct, list[Steps](), list[int]()
        assert isinstance(first, Composed)

        def begin() -> list[Any]:
            second = self._second = self._second or self._beside(meet)
            assert isinstance(second.direct, Composed)
            steps = first.all_reduce(x, op, second.direct)
            under_way.append(steps)
            begun = next(steps)()

            def go_on() -> list[Any]:
                # A thread begins on a GPU's default stream: what computes there would have to end before the adds.
                with nullcontext() if first.lane is None else first.lane.use():
                    for handle in begun:
                        handle.wait()
                    before = second.crossed
                    handles = next(steps)()
                crossed.append(second.crossed - before)
                return handles

            return [self._behind.begin(go_on)]

        yield begin
        next(under_way[0], None)
        self._crossed += sum(crossed)
        assert self._second is not None
        self._second.returned()

    def _beside(self, meet: Callable[[], None]) -> "Route":
        """The way of `direct` over the process group beside this one. A collective the first time."""
        assert self.handle is not None
        return self._of(beside(self.handle, meet), transport="gloo", link=self.link)

    @property
    def crossed(self) -> int:
        """Bytes that have gone over cables so far."""
        return self.cables.crossed if self.cables else 0

    def scratch(self) -> list[Tensor]:
        """The buffers that collectives keep between calls."""
        return [buffer for way in dict.fromkeys((self.present, self.direct)) for buffer in way.scratch()]

    def trim(self) -> None:
        """Give back the buffers that were kept, with no collective under way. On every rank."""
        for way in dict.fromkeys((self.present, self.direct)):
            way.trim()

    def counted(self, steps: Steps, cross: Callable[[int], None]) -> Steps:
        """The same steps, where there are cables; `cross` is told the bytes that each sends over them."""
        cables = self.cables
        assert cables is not None

        def begin(phase: Phase) -> list[Any]:
            before = cables.crossed
            handles = phase()
            cross(cables.crossed - before)
            return handles

        for phase in steps:
            yield partial(begin, phase)
        cross(self.present.crossed_behind() + self._crossed)
        self._crossed = 0

    def returned(self) -> None:
        """A call is over, and its caller goes on."""
        if self.cables is not None:
            self.cables.returned()

    def _throttled(self, way: Library) -> Transport:
        return way if self.cables is None else Throttled(way, self.cables, self.backend, self.streams)

    def _library(self, handle: dist.ProcessGroup | None, wish: str, deterministic: bool) -> Transport:
        """By torch.distributed: the library's own collectives only where they are fast and their order is free."""
        if wish not in ("", "gloo", "shared"):
            raise ValueError(f"REFIMPL_TRANSPORT must be gloo or shared, or not set, not {wish!r}")
        if handle is None:
            return Alone()
        kind = Composed if self.backend == "gloo" or deterministic else Native
        return self._throttled(kind(handle, self.backend, self.streams))

    def _laid(self, handle: dist.ProcessGroup | None) -> Cables | None:
        """The cables between the group's ranks; None if all are near."""
        cables = Cables(self.link, handle) if self.link is not None and handle is not None else None
        if cables is None or not cables.apart:
            return None
        if self.backend != "gloo":
            raise RuntimeError(
                f"a slow link is played between tensors on the CPU; this group's backend is {self.backend}: unset "
                "REFIMPL_LINK"
            )
        return cables


def meet(handle: dist.ProcessGroup) -> Shared | str:
    """The transport of this group, or why it cannot be had: the same answer on every rank. A collective."""
    reason, own = unsupported(), None
    words = all_words(handle.size())
    if not reason:
        try:
            own = Own(words)
        except OSError as error:
            reason = f"rank {dist.get_rank()} cannot make memory to share: {error.strerror} (ulimit -f, ulimit -v)"
    me = (host(), os.getpid(), own.descriptor) if own else reason
    known = _everyone(handle, me)
    if own is None or any(isinstance(one, str) or one[0] != me[0] for one in known):
        return next((one for one in known if isinstance(one, str)), ELSEWHERE)
    try:
        files = [own if m == handle.rank() else of_peer(pid, fd, words) for m, (_, pid, fd) in enumerate(known)]
        transport = Shared(handle, files, own, [pid for _, pid, _ in known])
    except OSError as error:
        reason = f"rank {dist.get_rank()} cannot map the memory of a peer: {error}"
    return next(filter(None, _everyone(handle, reason)), "") or transport


def _everyone(handle: dist.ProcessGroup, mine: Any) -> list[Any]:
    return [loads(one) for one in to_everyone(handle, dumps(mine))]
