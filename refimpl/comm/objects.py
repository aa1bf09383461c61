"""Every rank's bytes on every rank of a gloo group: one all-gather where all are short, and mostly all are.

torch's `all_gather_object` sends two, the lengths before the bytes, and pickles once more. Half of what a small object
costs is saved: the ranks of this project say many to each other before the first step.
"""

import torch
import torch.distributed as dist

SHORT = 504  # bytes of a message that go with its length
_LENGTH = 8


def to_everyone(handle: dist.ProcessGroup, message: bytes) -> list[bytes]:
    """Each rank's message, in rank order; the rest of those over `SHORT` comes by a second all-gather."""
    first = _gathered(handle, len(message).to_bytes(_LENGTH, "little") + message[:SHORT], _LENGTH + SHORT)
    lengths = [int.from_bytes(one[:_LENGTH], "little") for one in first]
    more = max(lengths) - SHORT
    rest = _gathered(handle, message[SHORT:], more) if more > 0 else [b""] * len(first)
    return [(one[_LENGTH:] + other)[:n] for one, other, n in zip(first, rest, lengths, strict=True)]


def _gathered(handle: dist.ProcessGroup, message: bytes, size: int) -> list[bytes]:
    """Every rank's message, filled up to `size`. The memory is Python's: torch's default device may be another."""
    mine = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
    table = bytearray(handle.size() * size)
    dist.all_gather(list(torch.frombuffer(table, dtype=torch.uint8).view(-1, size).unbind()), mine, group=handle)
    return [bytes(table[start : start + size]) for start in range(0, len(table), size)]
