"""A group whose collectives go by levels: near ranks first, then far ones. DDP and the ZeRO stages take it as it is.

    group = two_level(Group.world(), near=4)        # 4 consecutive ranks are a node; or of_mesh(mesh, "far", "near")
    stage = Zero2(model, optimizer, group)

or, with no line changed, REFIMPL_COLLECTIVES=two-level for whoever trains over all ranks; nodes are then those of
`nodes.py` (REFIMPL_RANKS_PER_NODE, else LOCAL_WORLD_SIZE). REFIMPL_COLLECTIVES=measured measures the links first, in
some seconds, and takes for each collective and size what the alpha-beta model says is fastest (`level_model.py`).

Bits: those of `hierarchy.py`, (g0 + g1) + (g2 + g3), the same in every run, on every rank, and in DDP and all ZeRO
stages: an all-reduce and a reduce-scatter add an element in one order. They are not the bits of one process that adds
micro-batches in rank order, unless there is one level only: nodes of one rank, or one node of all. `measured` may
choose other algorithms for other sizes, each with its own order: the same in every run in which the measurement leads
to the same choices.

The bytes in the group's ledger are those of its flat collectives, which the two levels together send too (see
`hierarchy.py`; an all-to-all's take two hops). What went near and what far is in the ledgers of `near` and `far`.
"""

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from refimpl.comm import halving, hierarchy, ring, tree
from refimpl.comm.axes import neighbours
from refimpl.comm.behind import Behind
from refimpl.comm.collectives import Op, joined
from refimpl.comm.group import Group
from refimpl.comm.hierarchy import AllReduce
from refimpl.comm.level_model import Choice, choose
from refimpl.comm.mesh import Mesh
from refimpl.comm.nodes import on_nodes
from refimpl.comm.process_group import anew
from refimpl.comm.topology import Topology, measure
from refimpl.comm.transport import Transport
from refimpl.comm.work import Steps
from refimpl.measure.ledger import Ledger

ALGORITHMS: dict[str, AllReduce] = {"exchange": Group, "ring": ring, "halving": halving, "tree": tree}
WISHES = ("", "flat", "two-level", "measured")
ALWAYS = Choice(two_level=True, algorithm="exchange")
Choose = Callable[[str, int], Choice]  # (collective, bytes of the whole buffer) -> how; the same on every rank


class ByLevels(Transport):
    """Two-level collectives over groups that nobody else uses: a thread of this transport speaks in them.

    Messages between two ranks go by `messages`.
    """

    gathers_lists = False  # separate tensors are gathered into one buffer, and copied

    def __init__(self, messages: Transport, near: Group, far: Group, flat: Group, choose: Choose | None = None) -> None:
        """`flat`: all ranks, far.rank * near.size + near.rank. `choose`: how; two levels by exchange by default."""
        super().__init__(flat.rank, flat.size)
        self.near, self.far, self.flat, self.messages = near, far, flat, messages
        self.choose: Choose = choose or (lambda collective, size: ALWAYS)
        self._behind = Behind()
        self._crossed = 0  # of collectives that are over, not yet asked for

    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        yield from self._do(self._job("all_reduce", x.nbytes, x, op))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        yield from self._do(self._job("reduce_scatter", x.nbytes, out, x, op))

    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        whole = joined(chunks)
        out = x.new_empty(x.numel() * self.size) if whole is None else whole
        yield from self._do(self._job("all_gather", out.nbytes, out, x))
        if whole is None:
            for chunk, part in zip(chunks, out.view(self.size, -1), strict=True):
                chunk.copy_(part)

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> Steps:
        two_level = self.choose("all_to_all", x.nbytes).two_level
        way = partial(hierarchy.all_to_all, self.near, self.far) if two_level else self.flat.all_to_all
        yield from self._do(lambda: way(out, x, out_splits=out_splits, in_splits=in_splits))

    def broadcast(self, x: Tensor, root: int) -> Steps:
        yield from self._do(partial(hierarchy.broadcast, self.near, self.far, x, root))

    def send(self, x: Tensor, to: int) -> Steps:
        return self.messages.send(x, to)

    def recv(self, x: Tensor, source: int) -> Steps:
        return self.messages.recv(x, source)

    def send_recv(self, x: Tensor, to: int, out: Tensor, source: int) -> Steps:
        return self.messages.send_recv(x, to, out, source)

    def _job(self, collective: str, size: int, *args: Any) -> Callable[[], object]:
        """The collective of `args`, whose whole buffer has `size` bytes, as it is chosen to be done."""
        how = self.choose(collective, size)
        by = ALGORITHMS[how.algorithm]
        if how.two_level:
            return partial(getattr(hierarchy, collective), self.near, self.far, *args, within=by, between=by)
        return partial(getattr(by, collective), self.flat, *args)

    def _do(self, job: Callable[[], object]) -> Steps:
        """The one step of a collective."""
        crossed: list[int] = []

        def counted() -> list[Any]:
            before = self._over_links()
            job()
            crossed.append(self._over_links() - before)
            return []

        yield lambda: [self._behind.begin(counted)]
        self._crossed += sum(crossed)

    def _over_links(self) -> int:
        """Bytes that have gone over slow links, by the ledgers of the groups that the thread speaks in."""
        return sum(sum(part.ledger.crossed_bytes().values()) for part in (self.near, self.far, self.flat))

    def crossed_behind(self) -> int:
        crossed, self._crossed = self._crossed, 0
        return crossed

    def scratch(self) -> list[Tensor]:
        return [buffer for group in (self.near, self.far, self.flat) for buffer in group.scratch()]

    def trim(self) -> None:
        for group in (self.near, self.far, self.flat):
            self._behind.call(group.trim)


def two_level(group: Group, near: int | None = None, choose: Choose | None = None) -> Group:
    """`group`'s ranks, with its ledger, as a group whose collectives go by two levels. A collective.

    `near`: how many consecutive ranks are a node; by default what `nodes.py` says. The group itself comes back where
    there is one level: a node of all ranks, or nodes of one. ValueError if nodes of `near` ranks do not make up the
    group.
    """
    each = _in_a_node(group) if near is None else near
    if each < 1 or group.size % each:
        raise ValueError(f"two_level: {group.size} ranks are not nodes of {each} each: give a divisor as `near`")
    if each in (1, group.size):
        return group
    if group.device.type != "cpu":
        raise NotImplementedError(f"two_level: for tensors on the CPU, not on {group.device.type}: NCCL has its own")
    inside, line = neighbours(group, each, anew)  # the thread's, not to be shared with who else works
    for part in (inside, line):
        part.ledger = Ledger()  # written by the thread alone
    flat = Group(anew([group.ranks]), Ledger(), group.device, group.deterministic, link=group.link)
    result = Group(group.handle, group.ledger, group.device, group.deterministic, link=group.link)
    result.use(ByLevels(result.messages, inside, line, flat, choose))
    return result


def measured(group: Group, found: Topology | None = None) -> Group:
    """`group` by the nodes that its links show, each collective by what is predicted to be fastest. A collective.

    `found`: what was measured, the same on every rank; it is measured now if that is missing. The group itself comes
    back where no ranks are nearer than others, or nodes are not consecutive ranks, equally many.
    """
    if group.size == 1:
        return group
    if found is None:
        probe = Group(group.handle, Ledger(), group.device, group.deterministic, link=group.link)
        probe.share_messages()
        found = measure(probe)
    levels = found.levels
    if levels is None or levels.size == 1:
        return group
    return two_level(group, levels.each, cache(lambda collective, size: choose(collective, size, levels)))


def of_mesh(mesh: Mesh, far: str, near: str, choose: Choose | None = None) -> Group:
    """The ranks along two axes of a mesh, the second inside the nodes of the first. A collective.

    ValueError if `near` does not follow `far` in the mesh.
    """
    return two_level(mesh.group(far, near), mesh.size(near), choose)


def world(ledger: Ledger | None = None, deterministic: bool = False) -> Group:
    """All ranks of the job, by levels if REFIMPL_COLLECTIVES says so. A collective then.

    ValueError for another value than two-level, measured or flat.
    """
    wish, group = os.environ.get("REFIMPL_COLLECTIVES", ""), Group.world(ledger, deterministic)
    if wish not in WISHES:
        raise ValueError(f"REFIMPL_COLLECTIVES must be two-level, measured or flat, or not set, not {wish!r}")
    if wish in ("", "flat"):
        return group
    return measured(group) if wish == "measured" else two_level(group)


def _in_a_node(group: Group) -> int:
    """Ranks of this group in each node. ValueError if nodes have different numbers of them."""
    counts = on_nodes(group.ranks, dist.get_world_size() if group.handle else 1)
    if len(set(counts.values())) > 1:
        raise ValueError(f"two_level: the ranks {group.ranks} are not spread evenly over nodes: {counts} (node: ranks)")
    return next(iter(counts.values()))
