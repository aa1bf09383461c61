"""A log of collectives, `comms_logger` of DeepSpeed's JSON: how often, how large, how long, how fast.

Two bandwidths, in Gbit/s, from a message of n bytes that took t on N ranks:

    op                            algbw (tput) x t    busbw x t
    all_reduce                    2 n                 2 n (N-1)/N
    all_gather                    N n                 n (N-1)
    reduce_scatter, all_to_all    n                   n (N-1)/N
    messages, broadcast, ...      n                   n

algbw is what the caller gets; busbw what a link carries for it, to be held against the hardware. n is the tensor that
the call was given: of an all-gather this rank's part, of a reduce-scatter the whole. (DeepSpeed to 0.19.8 takes it for
a part, and says N times too much.) The table, its bytes and its averages are DeepSpeed's; a latency here is the call's
own, where DeepSpeed (0.19) enters the sum of all calls of that name so far.
DeepSpeed's file: deepspeed/utils/comms_logging.py. nccl-tests: doc/PERFORMANCE.md.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import torch.distributed as dist

GATHERS = ("all_gather", "all_gather_into_tensor")
REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
EXCHANGES = ("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single")
MESSAGES = ("send", "recv", "isend", "irecv")
PLAIN = (*MESSAGES, "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier")
UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
FIRST = ("Comm. Op", "Message Size", "Count")
HEAD = (*FIRST, "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
STRAGGLER_HEAD = (*FIRST, "Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)")
WIDTH = 20  # of a column

Latencies = dict[str, dict[int, list[float]]]  # name -> bytes of a message -> milliseconds, in order
Everyone = Callable[[Latencies], list[Latencies]]  # of every rank, in rank order


def bandwidths(op: str, size: float, ms: float, ranks: int) -> tuple[float, float]:
    """(algbw, busbw) in Gbit/s of a message of `size` bytes. ValueError for an op of no formula."""
    share = (ranks - 1) / ranks
    if op in GATHERS:
        alg, bus = size * ranks, size * ranks * share
    elif op in REDUCTIONS:
        alg, bus = 2 * size, 2 * size * share
    elif op in EXCHANGES:
        alg, bus = size, size * share
    elif op in PLAIN:
        alg = bus = size
    else:
        raise ValueError(f"comms log: {op!r} is none of {', '.join((*REDUCTIONS, *GATHERS, *EXCHANGES, *PLAIN))}")
    return alg * 8 / ms / 1e6, bus * 8 / ms / 1e6  # bytes a millisecond -> Gbit/s


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without that share of the smallest and of the largest; 0 of nothing. `data` stays as it is."""
    if not 0 <= trim_percent <= 1:
        raise ValueError(f"trim_mean: trim_percent = {trim_percent}: must be between 0 and 1")
    drop = round(len(data) * trim_percent)
    kept = sorted(data)[drop : len(data) - drop]
    return sum(kept) / len(kept) if kept else 0.0


def convert_size(size: int) -> str:
    """1536 -> "1.5 KB", in powers of 1024."""
    power = 0
    while size >= 1024 ** (power + 1) and power < len(UNITS) - 1:
        power += 1
    return f"{round(size / 1024**power, 2)} {UNITS[power]}" if size else "0B"


def speaks() -> bool:
    """Whether this is the rank that prints: number 0, or one that has joined nothing."""
    return not dist.is_initialized() or dist.get_rank() == 0


class CommsLog:
    """What was logged, under DeepSpeed's names.

    `comms_dict`: name -> bytes of a message -> [count, latencies in ms, algbw, busbw in Gbit/s], in order of the calls.
    """

    def __init__(
        self,
        enabled: bool = False,
        verbose: bool = False,
        prof_all: bool = True,
        prof_ops: Iterable[str] = (),
        debug: bool = False,
    ) -> None:
        """verbose: print each call on rank 0. Without `prof_all` only what `prof_ops` names. debug: who called."""
        self.enabled, self.verbose, self.prof_all, self.debug = enabled, verbose, prof_all, debug
        self.prof_ops = list(prof_ops)
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}

    def wants(self, *names: str, prof: bool = False) -> bool:
        """Whether a call is logged that goes by any of these names. `prof`: the caller asked for this one."""
        return self.enabled and (prof or self.prof_all or any(name in self.prof_ops for name in names))

    def name(self, name: str, depth: int) -> str:
        """What a call is logged under; `depth`: how many frames above the caller of this stands who made it."""
        return f"{name} | [Caller Func: {sys._getframe(depth + 1).f_code.co_name}]" if self.debug else name

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int, ranks: int = 1) -> None:
        """Log a call of `raw_name` by `ranks` ranks under `record_name`; latency in ms, msg_size in bytes."""
        algbw, busbw = bandwidths(raw_name, msg_size, latency, ranks)
        record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for column, value in zip(record[1:], (latency, algbw, busbw), strict=True):
            column.append(value)
        if self.verbose and speaks():
            print(
                f"[Rank 0] comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | "
                f"algbw (Gbps): {algbw:.2f} | busbw (Gbps): {busbw:.2f}"
            )

    def take(self, other: "CommsLog") -> None:
        """What another has logged comes behind what this one has."""
        for name, sizes in other.comms_dict.items():
            for size, (count, *columns) in sizes.items():
                record = self.comms_dict.setdefault(name, {}).setdefault(size, [0, [], [], []])
                record[0] += count
                for own, more in zip(record[1:], columns, strict=True):
                    own += more

    def start_profiling_comms(self) -> None:
        """Log every call from now on."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Log only what `prof_ops` names from now on."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Log these too."""
        self.prof_ops = list(dict.fromkeys([*self.prof_ops, *op_name_list]))

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Log these no longer, unless all are."""
        gone = set(op_name_list)
        self.prof_ops = [op for op in self.prof_ops if op not in gone]

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """`comms_dict`, a copy of the outermost dictionary."""
        return dict(self.comms_dict)

    def has_data(self) -> bool:
        """Whether anything was logged."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forget all calls: the next epoch's table begins empty."""
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        """The names that calls were logged under."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """How many calls were logged."""
        return sum(record[0] for sizes in self.comms_dict.values() for record in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """The table's rows of one name, by bytes of a message; None if there are none."""
        sizes = self.comms_dict.get(operation_name)
        if sizes is None:
            return None
        return {
            size: {
                "count": count,
                "total_latency_ms": sum(latencies),
                "avg_latency_ms": trim_mean(latencies, 0.1),
                "tput_avg_gbps": trim_mean(algbws, 0.1),
                "busbw_avg_gbps": trim_mean(busbws, 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
            for size, (count, latencies, algbws, busbws) in sorted(sizes.items())
        }

    def log_all(
        self,
        print_log: bool = True,
        show_straggler: bool = False,
        return_dict: bool = False,
        everyone: Everyone = lambda mine: [mine],
    ) -> dict[str, Any] | None:
        """Print the table; averages are without the tenth at each end. -> the same numbers, if `return_dict`.

        show_straggler: a second table, of the time for which this rank waited for slower ones: its latency less the
        least of all ranks for the same call. `everyone` then brings all ranks' latencies, a collective.
        """
        joined = dist.is_initialized()
        found: dict[str, Any] = {
            "summary": {name: self.get_operation_summary(name) for name in self.comms_dict},
            "straggler_analysis": None,
            "metadata": {
                "world_size": dist.get_world_size() if joined else 1,
                "rank": dist.get_rank() if joined else 0,
                "timestamp": datetime.now().isoformat(),
            },
        }
        lines = _table(HEAD, found["summary"])
        if show_straggler:
            found["straggler_analysis"] = self._stragglers(everyone)
            lines += ["_" * 31, "Breakdown with straggler effect", "-" * 31]
            lines += _table(STRAGGLER_HEAD, found["straggler_analysis"])
        if print_log:
            print("\n".join(lines))
        return found if return_dict else None

    def _stragglers(self, everyone: Everyone) -> dict[str, dict[int, dict[str, Any]]]:
        """By name and bytes. Ranks that made another number of these calls (messages) are not compared with."""
        ranks = everyone({name: {size: r[1] for size, r in sizes.items()} for name, sizes in self.comms_dict.items()})
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for name, sizes in self.comms_dict.items():
            found[name] = {}
            for size, (count, latencies, *_) in sorted(sizes.items()):
                columns = [latencies, *(rank.get(name, {}).get(size, []) for rank in ranks)]
                least = [min(call) for call in zip(*(c for c in columns if len(c) == count), strict=True)]
                waited = [own - shortest for own, shortest in zip(latencies, least, strict=True)]
                found[name][size] = {
                    "count": count,
                    "total_comm_lat_ms": sum(least),
                    "total_straggler_ms": sum(waited),
                    "avg_comm_lat_ms": trim_mean(least, 0.1),
                    "avg_straggler_ms": trim_mean(waited, 0.1),
                    "msg_size_bytes": size,
                    "msg_size_str": convert_size(size),
                }
        return found


def _table(head: Sequence[str], rows: dict[str, Any]) -> list[str]:
    """One line a name, one below it for each size; columns are 20 wide, as DeepSpeed's."""
    lines = ["".join(f"{title:<{WIDTH}}" for title in head)]
    for name, sizes in rows.items():
        lines.append(name)
        for row in sizes.values():
            numbers = [f"{value:.2f}" for key, value in row.items() if key.endswith(("_ms", "_gbps"))]
            cells = [" ", row["msg_size_str"], str(row["count"]), *numbers]
            lines.append("".join(f"{cell:<{WIDTH}}" for cell in cells))
    return lines
