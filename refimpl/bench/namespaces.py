"""Ranks in two network namespaces that a pair of virtual Ethernet devices joins: two nodes of one machine, over TCP.

    +-- node 0, 10.77.0.1 --+              +-- node 1, 10.77.0.2 --+
    |  rank 0 ... rank L-1  |-- veth ~~~~~ veth --|  rank L ...     |
    +-----------------------+              +-----------------------+

A rank sees its own node's devices alone, so what it sends to the other node goes through the kernel's whole network
stack and is counted there (`device_bytes`). Nothing slows it down: that is what `refimpl.comm.link` is for. Needs
Linux, iproute2, util-linux and root or user namespaces; all of it goes with its processes. See man 4 veth.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from refimpl import launch
from refimpl.ranks.life import held, until_closed
from refimpl.ranks.travel import dumps, loads

T = TypeVar("T")
DEVICE, ADDRESSES = "node", ("10.77.0.1", "10.77.0.2")
_LIMIT = 30.0  # seconds a command that sets up may take


def run(
    fn: Callable[..., T], *args: Any, ranks: int = 2, environment: Mapping[str, str] | None = None, timeout: float = 120
) -> list[T]:
    """fn(*args) on `ranks` new processes, half of them in each namespace, joined by gloo over TCP; results by rank.

    `environment`: further variables of theirs. RuntimeError where namespaces cannot be had, with the reason, and for a
    rank that fails, with its output; ValueError for an odd number of ranks.
    """
    if ranks < 2 or ranks % 2:
        raise ValueError(f"two nodes have an even number of ranks, not {ranks}")
    each = ranks // 2
    with two_nodes() as nodes, tempfile.TemporaryDirectory(prefix="refimpl-") as name, held() as life:
        folder = Path(name)
        (folder / "work").write_bytes(dumps((fn, args)))
        processes = []
        try:
            for rank in range(ranks):
                environ = {**os.environ, **_place(rank, ranks, each), **(environment or {})}
                command = [*nodes[rank // each], sys.executable, "-m", __name__, name]
                with (folder / f"output-{rank}").open("w") as output:
                    processes.append(
                        subprocess.Popen(command, env=environ, stdin=life, stdout=output, stderr=subprocess.STDOUT)
                    )
            end = time.monotonic() + timeout
            failed = [rank for rank, process in enumerate(processes) if process.wait(max(0.0, end - time.monotonic()))]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed:
            said = ((folder / f"output-{rank}").read_text() for rank in failed)
            raise RuntimeError(
                "\n".join(f"rank {rank} failed:\n{text}" for rank, text in zip(failed, said, strict=True))
            )
        return [loads((folder / f"result-{rank}").read_bytes()) for rank in range(ranks)]


@contextmanager
def two_nodes() -> Iterator[tuple[list[str], list[str]]]:
    """Two joined namespaces: for each the words before a command that runs it there. RuntimeError if there are none."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"no network namespaces: {', '.join(missing)} is not installed")
    # Root needs no user namespace; whoever is not root is root in one of its own.
    make, enter = ([], []) if os.geteuid() == 0 else (["-U", "-r"], ["-U", "--preserve-credentials"])
    holders: list[subprocess.Popen[str]] = []
    try:
        first = _hold([], [*make, "-n"], holders)
        inside = ["nsenter", "-t", str(first), *enter]
        second = _hold(inside if enter else [], ["-n"], holders)
        nodes = tuple(["nsenter", "-t", str(pid), *enter, "-n"] for pid in (first, second))
        _do(*nodes[0], "ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(second))
        for node, address in zip(nodes, ADDRESSES, strict=True):
            _do(*node, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _do(*node, "ip", "link", "set", device, "up")
        yield nodes[0], nodes[1]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def unsupported() -> str:
    """Why there are no two joined namespaces here; "" if there are."""
    try:
        with two_nodes():
            return ""
    except RuntimeError as error:
        return str(error)


def device_bytes() -> int:
    """What this process's node has sent to the other so far, headers included, as the kernel counts it."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DEVICE:
            return int(counts.split()[8])
    raise RuntimeError("this process is in no namespace of `two_nodes`")


def _hold(before: list[str], flags: list[str], holders: list[subprocess.Popen[str]]) -> int:
    """A process in new namespaces, which ends with this one: its number."""
    command = [*before, "unshare", *flags, "sh", "-c", "echo $$; exec cat"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    holders.append(holder)
    assert holder.stdout is not None
    number = holder.stdout.readline().strip()
    if not number:
        raise RuntimeError(f"no network namespaces: {' '.join(command[:-3])}: {holder.communicate()[1].strip()}")
    return int(number)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    if done.returncode:
        raise RuntimeError(f"no network namespaces: {' '.join(command)}: {done.stderr.strip()}")


def _place(rank: int, ranks: int, each: int) -> dict[str, str]:
    """What torchrun would set, and that bytes go by TCP: the two nodes could map each other's memory."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1",
        "REFIMPL_TRANSPORT": "gloo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip


def _end_with_parent() -> None:
    until_closed(sys.stdin.fileno())
    os._exit(1)


def _main(folder: Path) -> None:
    """One rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    fn, args = loads((folder / "work").read_bytes())
    launch.join("cpu")
    (folder / f"result-{os.environ['RANK']}").write_bytes(dumps(fn(*args)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
