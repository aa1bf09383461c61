"""The roll call: ranks say what they are about to do before they do it, so that a wrong turn is named, not a hang.

Collectives match by position only. A rank that skips a module pairs its next gather with another rank's gather of
something else: with equal sizes the weights are silently wrong, with different ones the job hangs until a timeout that
names nothing (DeepSpeed issues 7998, 5828). So each collective of ZeRO-3 is preceded by one of 8 bytes, a checksum of
what it is for. Cost: 8(N-1) bytes and one small message a rank each time; `check_order=False` leaves it out.
"""

import zlib

import torch
import torch.distributed as dist

from refimpl.comm.group import Group


class RankDivergence(RuntimeError):
    """Ranks reached different collectives at the same point."""


class RollCall:
    """`roll_call("gather h.3")` on every rank, or RankDivergence on every rank."""

    def __init__(self, group: Group, enabled: bool = True) -> None:
        self.group, self.enabled = group, enabled and group.size > 1
        self.line = control_line(group) if self.enabled else group

    def __call__(self, what: str) -> None:
        if not self.enabled:
            return
        mine = torch.tensor([zlib.crc32(what.encode())])  # [1] int64
        codes = torch.empty(self.group.size, dtype=torch.int64)  # [N]
        self.line.all_gather(codes, mine, tag="roll call")
        if bool((codes != mine).any()):
            said = self.line.all_gather_object(what)
            ranks = "; ".join(f"rank {r}: {text}" for r, text in enumerate(said))
            raise RankDivergence(
                f"the ranks take different paths through the model. {ranks}. ZeRO-3 needs every rank to run the same "
                "modules in the same order: make the branch depend on something that is equal on all ranks"
            )


def control_line(group: Group) -> Group:
    """A group of the same ranks for host tensors: the group itself, or a gloo one beside NCCL."""
    if group.backend != "nccl":
        return group
    ranks = dist.get_process_group_ranks(group.handle)
    handle = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return Group(handle, group.ledger, torch.device("cpu"))
