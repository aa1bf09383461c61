"""Freed memory stays with the process: glibc gives large blocks back, and the next one is zeroed page by page.

A buffer that comes and goes at every layer, as ZeRO-3's gathered parameters do, costs a page fault for each 4 KB of it
each time, about as much as copying it. A rank does the same work step after step and needs the memory again. What it
frees then still counts as resident (RSS). Blocks of more than 32 MB, glibc's own limit, come and go as before.
See man 3 mallopt.
"""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of <malloc.h>
_NEVER, _LARGEST, _SMALL = 2**31 - 1, 32 << 20, 1 << 16  # bytes


def keep_freed_memory() -> bool:
    """Tell this process's allocator. False where it is not glibc's, or the user has said what it should do."""
    libc = ctypes.CDLL(None)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    said = "glibc.malloc" in tunables or any(key.startswith("MALLOC_") for key in os.environ)
    if said or not hasattr(libc, "gnu_get_libc_version"):
        return False
    # Blocks come from the heap, not from mmap, which is undone when they are freed; the heap's end stays where it is.
    return bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST) and libc.mallopt(_TRIM_THRESHOLD, _NEVER))


def give_freed_memory_back() -> None:
    """The opposite: blocks of 64 KB and more are the kernel's again when they are freed. glibc only."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _SMALL)
    libc.mallopt(_TRIM_THRESHOLD, _SMALL)
