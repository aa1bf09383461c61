"""The mixture's permutations with ranks in between: rows go to the rank of their expert, answers come back.

    permute      this rank's tokens, a row for each route that is kept, by expert     (`refimpl/model/moe.py`)
    loads        every rank hears what every rank has for every expert                8 E (ep-1) bytes
    exchange     rows to the ranks of their experts                                   all-to-all
    experts      this rank's, on blocks by (source, expert)
    exchange     answers back                                                         all-to-all
    combine      weighted, at the rank that has the token

and backward the same from the end: two all-to-alls each way. A rank of T tokens, k routes each, sends about
k T M (ep-1)/ep elements in each, whatever the number of experts. Exact: `refimpl/plan/expert.py`.

`padded`: every expert has C slots for every rank's tokens, full or not, as in GShard and DeepSpeed. Sizes are then the
same in every step and nothing need be heard but the largest C; E C M (ep-1)/ep elements travel, and experts multiply
empty slots. Otherwise only tokens travel, dropped or not dropped.

Under tensor parallelism all ranks of `tensor` hold the same tokens, and would send each of them tp times. Each goes on
with 1/tp of them, and the results are gathered: T M (tp-1)/tp elements inside the node, and all-to-alls of 1/tp.
A gate that draws (noise, random token selection) has to draw the same on each, as dropout has (`parallel/draws.py`):
an engine sees to it, and whoever seeds the ranks apart afterwards has copies that drift apart.
Experts that are whole on each tensor rank see a part of the tokens, and their gradients are summed; experts that are
themselves cut into columns and rows (`cut_experts`) need all tokens, so these are gathered before them.

Lepikhin et al. 2020 (GShard), arXiv:2006.16668; Singh et al. 2023 (tensor, expert and data), arXiv:2303.06318, section
5. DeepSpeed: deepspeed/moe/sharded_moe.py, `MOELayer.forward`; moe/mappings.py, `drop_tokens`, `gather_tokens`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.model.moe import Many, combine, permute
from refimpl.model.routes import Routes, Rows, fill
from refimpl.parallel.conjugates import conjugate
from refimpl.parallel.expert.exchange import Table, Way, by, loads, turned


@dataclass
class Dispatch:
    """What stands in for `refimpl.model.moe.mix` where rank r of `group` has the r-th part of the experts."""

    group: Group
    way: Way
    tensor: Group
    padded: bool = False
    cut_experts: bool = False

    def __call__(self, experts: Many, x: Tensor, routes: Routes) -> Tensor:
        """experts: this rank's. x [T, M] -> [T, M]. A collective, and so is backward. ValueError for other experts."""
        if routes.experts % self.group.size:
            raise ValueError(f"{routes.experts} experts cannot be dealt out to {self.group.size} ranks equally")
        share = Share(self.tensor, [len(x)], even=True)
        mine = share.part(x)
        routes = part_of(routes, share)
        rows, loads = self.settled(routes)
        answers = self.through(experts, permute(mine, rows), loads)
        return share.whole(combine(answers, rows, routes.weights))

    def __deepcopy__(self, memo: object) -> "Dispatch":
        return self  # a copied model talks over the same groups

    def settled(self, routes: Routes) -> tuple[Rows, list[list[int]]]:
        """-> this rank's rows; what every rank of the group has for every expert, `[ep][E]`."""
        if not self.padded:
            return routes.rows, loads(routes.rows.sizes, self.group)
        most = max(loads([routes.capacity], self.group, "capacity"))[0]
        return routes.padded(most), [[most] * routes.experts] * self.group.size

    def through(self, experts: Many, rows: Tensor, loads: list[list[int]]) -> Tensor:
        """This rank's rows, by expert -> their answers."""
        each = len(loads[0]) // self.group.size
        to = [[sum(load[d * each : (d + 1) * each]) for d in range(self.group.size)] for load in loads]
        sizes = [load[self.group.rank * each : (self.group.rank + 1) * each] for load in loads]
        here = self.move(rows, to)
        if not self.cut_experts or self.tensor.size == 1:
            answers = answered(experts, here, sizes)
            if torch.is_grad_enabled() and not answers.requires_grad:
                answers.requires_grad_()  # other ranks' experts may be trained where these are frozen: all go back
            return self.move(answers, turned(to))
        share, sizes = self.of_all_tensor_ranks(sizes)
        return self.move(share.part(answered(experts, share.whole(here), sizes)), turned(to))

    def move(self, x: Tensor, rows: Table) -> Tensor:
        """This rank's rows by the rank they go to -> by the rank they come from; and so is backward."""
        return conjugate(x, self.group, lambda x: self.way(x, rows), lambda grad: self.way(grad, turned(rows)))

    def of_all_tensor_ranks(self, sizes: list[list[int]]) -> tuple["Share", list[list[int]]]:
        """Their rows one after the other, each rank's sources apart."""
        all_sizes = loads([n for row in sizes for n in row], self.tensor)
        each = len(sizes[0])
        by_source = [flat[i : i + each] for flat in all_sizes for i in range(0, len(flat), each)]
        return Share(self.tensor, [sum(flat) for flat in all_sizes]), by_source


def answered(experts: Many, x: Tensor, sizes: list[list[int]]) -> Tensor:
    """x [R, M], rows by (source, expert) -> [R, M].

    In fp32 each source's rows apart, for the bits. In 16 bits there are no such bits to keep, and each source's part of
    a weight's gradient would be rounded: there an expert multiplies all its rows at once.
    """
    sources, each = len(sizes), len(sizes[0])
    if sources == 1 or x.element_size() >= 4:
        return experts(x, sizes)
    together = by(x, [n for row in sizes for n in row], sources, each)
    answers = experts(together, [[sum(column) for column in zip(*sizes, strict=True)]])
    return by(answers, [n for column in zip(*sizes, strict=True) for n in column], each, sources)


class Share:
    """Rows of which each rank of a group has some, one rank's after the other's."""

    def __init__(self, group: Group, sizes: list[int], even: bool = False) -> None:
        """sizes: rows of each rank; `even`: their sum, shared out so that the last ranks have fewer or none."""
        if even:
            each = -(-sizes[0] // group.size)
            sizes = [max(0, min(each, sizes[0] - rank * each)) for rank in range(group.size)]
        self.group, self.sizes = group, sizes

    def part(self, x: Tensor) -> Tensor:
        """[all, ..], equal on all ranks -> this rank's. Its gradient comes together again."""
        return conjugate(x, self.group, self._part, self._whole)

    def whole(self, x: Tensor) -> Tensor:
        """This rank's -> [all, ..] on every rank, for what all of them compute alike."""
        return conjugate(x, self.group, self._whole, self._part)

    def _part(self, x: Tensor) -> Tensor:
        return x.split(self.sizes)[self.group.rank].clone()  # type: ignore[no-untyped-call,no-any-return]

    def _whole(self, x: Tensor) -> Tensor:
        most = max(self.sizes)
        mine = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        out = x.new_empty(self.group.size, *mine.shape)
        self.group.all_gather(out, mine, tag="tokens, tensor")
        return torch.cat([rows[:size] for rows, size in zip(out, self.sizes, strict=True)])


def part_of(routes: Routes, share: Share) -> Routes:
    """The routes of this rank's tokens, with slots of their own."""
    if share.group.size == 1:
        return routes
    indices, kept = share._part(routes.indices), share._part(routes.kept)
    slots, counts = fill(indices, kept, routes.experts)
    weights = share.part(routes.weights)
    return replace(routes, indices=indices, kept=kept, slots=slots, counts=counts, weights=weights, limit=None)
