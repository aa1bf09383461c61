"""Streams and events: which queued work waits for which. Every such call of the package goes through here.

A GPU runs what the host has queued, later and in several queues, the streams. Within one stream kernels run in the
order in which they were queued; between two streams there is no order until one waits for an event of the other:

    compute   backward kernels --+ record                      wait --> optimizer
                                 |                               |
    comm                         +--> wait -> reduce-scatter -> record

No call here makes the host wait. A CPU computes at once, in the order in which it is told: there all of this does
nothing. A test hands `Group` a recorder in place of either, and reads from its log which access waits for which.

Memory. torch's allocator gives a freed block to the next tensor of the stream that allocated it, at once, while
another stream may still use it. So whoever hands a tensor to another stream holds on to it until its own stream waits
for that one: `Work` does. FSDP2 keeps the same rule (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py), and
has no need of `record_stream`, which frees a block only when the GPU gets there.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Stream = Any  # torch.cuda.Stream, or what a recorder says
Event = Any  # torch.cuda.Event, or what a recorder says


class Streams:
    """A device without streams: all calls do nothing."""

    def new(self) -> Stream | None:
        """A stream beside the others; None where there are none."""
        return None

    def current(self) -> Stream | None:
        """The stream that the next kernel goes to."""
        return None

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Kernels of the block go to `stream`."""
        return nullcontext()

    def record(self, timed: bool = False) -> Event | None:
        """An event that happens once the current stream has done all that it was given so far. `timed`: see `ms`."""
        return None

    def wait(self, event: Event) -> None:
        """What the current stream is given from now on waits for `event`."""

    def is_done(self, event: Event) -> bool:
        """Whether it has happened."""
        return True

    def followed_by(self, other: Stream | None) -> None:
        """What the stream `other` is given from now on waits for all that the current one was given so far."""
        if other != self.current():
            event = self.record()
            with self.use(other):
                self.wait(event)

    def ms(self, first: Event, last: Event) -> float:
        """Milliseconds between two timed events. The host waits for the later one."""
        raise RuntimeError("a device without streams has no timed events: the host's clock is true there")


class CudaStreams(Streams):
    """The streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new(self) -> Stream:
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]  # before computing

    def current(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """A thread begins with the first GPU as its current one.

        `torch.cuda.stream` would make that current again at its end, and so give this process a context there, of half
        a gigabyte, whosever GPU it is. `torch.cuda.device` does so where there is one already.
        """
        there = torch.cuda.stream(stream)
        return there if self.device.index in (None, torch.cuda.current_device()) else self._from_elsewhere(there)

    @contextmanager
    def _from_elsewhere(self, there: AbstractContextManager[Any]) -> Iterator[None]:
        with torch.cuda.device(self.device), there:
            yield

    def record(self, timed: bool = False) -> Event:
        return self.current().record_event(torch.cuda.Event(enable_timing=timed))  # type: ignore[no-untyped-call]

    def wait(self, event: Event) -> None:
        self.current().wait_event(event)

    def is_done(self, event: Event) -> bool:
        return bool(event.query())

    def ms(self, first: Event, last: Event) -> float:
        last.synchronize()
        return float(first.elapsed_time(last))


def told(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The host's numbers as a tensor on `device`, without waiting.

    On a GPU by way of pinned memory: a copy from any other, as in `torch.tensor(numbers, device="cuda")`, makes the
    host wait for all that it has queued on the stream.
    """
    there = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on `device`; from the host by the way of `told`, so without waiting, and x may be written at once."""
    if not x.is_cpu or device.type == "cpu" or x.layout != torch.strided or x.requires_grad:
        return x.to(device)
    return torch.empty_like(x, pin_memory=device.type == "cuda").copy_(x).to(device, non_blocking=True)


def streams_of(device: torch.device) -> Streams:
    """What orders the work of this device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


class Lane:
    """The stream on which one group communicates, in the order of its calls."""

    def __init__(self, streams: Streams, stream: Stream) -> None:
        self.streams, self.stream = streams, stream

    @contextmanager
    def following(self) -> Iterator[None]:
        """The block's kernels go to this stream, behind all that the caller's stream was given so far."""
        asked = self.streams.record()
        with self.streams.use(self.stream):
            self.streams.wait(asked)
            yield

    def use(self) -> AbstractContextManager[Any]:
        """The block's kernels go to this stream."""
        return self.streams.use(self.stream)


def lane_of(streams: Streams) -> Lane | None:
    """A lane of its own, where there are streams."""
    stream = streams.new()
    return None if stream is None else Lane(streams, stream)
