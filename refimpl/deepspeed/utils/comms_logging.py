"""The log of collectives by DeepSpeed's name, over the ranks of this job: see refimpl/measure/comms_log.py.

DeepSpeed: deepspeed/utils/comms_logging.py.
"""

from typing import Any

import torch.distributed as dist

from refimpl.measure.comms_log import CommsLog, Everyone, Latencies, bandwidths, convert_size

__all__ = ["CommsLogger", "calc_bw_log", "convert_size"]


def world_size() -> int:
    """All ranks of this job; 1 before anything is joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """(algbw, busbw) in Gbit/s of `size` bytes in `duration` ms over all ranks. ValueError for an unknown op."""
    return bandwidths(comm_op, size, duration, world_size())


def of_everyone(mine: Latencies) -> list[Latencies]:
    """Every rank's latencies. A collective."""
    ranks: list[Any] = [mine] * world_size()
    if len(ranks) > 1:
        dist.all_gather_object(ranks, mine)
    return ranks


class CommsLogger(CommsLog):
    """A `CommsLog` whose calls are of all ranks, unless they say otherwise."""

    def configure(self, comms_config: Any) -> None:
        """As a configuration's `comms_logger`, an object with the key's fields, or one that has such an attribute.

        `enabled` counts. (In DeepSpeed the section alone turns the log on.)
        """
        section = getattr(comms_config, "comms_logger", comms_config)
        self.enabled = section.enabled
        if self.enabled:
            self.verbose, self.debug, self.prof_all = section.verbose, section.debug, section.prof_all
            self.prof_ops = list(section.prof_ops)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int, ranks: int | None = None) -> None:
        """Log a call; see `CommsLog.append`."""
        super().append(raw_name, record_name, latency, msg_size, ranks or world_size())

    def log_all(
        self,
        print_log: bool = True,
        show_straggler: bool = False,
        return_dict: bool = False,
        everyone: Everyone = of_everyone,
    ) -> dict[str, Any] | None:
        """Print the table; see `CommsLog.log_all`. With `show_straggler` a collective."""
        return super().log_all(print_log, show_straggler, return_dict, everyone)
