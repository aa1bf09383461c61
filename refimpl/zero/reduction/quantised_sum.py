"""Gradients reduced in two hops of int4 (qgZ of ZeRO++): what is rounded is summed at once, not passed on and on.

    hop     between                 each rank sends                then
    near    the P ranks of a node   Psi (1/2 + 4/256) (P-1)/P      dequantise, add in rank order, in fp32
    far     n ranks, one a node     Psi (1/2 + 4/256) (n-1)/N      the same, and divide

A ring's reduce-scatter would round every partial sum, N - 1 times; here each gradient is rounded twice, whatever N is.
Between nodes a node sends Psi / 2 (n-1)/n bytes, a quarter of bf16's. What goes to place i of this node are the chunks
of place i of every node: the second hop then leaves each rank with its own chunk. Sent in the buffer's order instead,
shards would end up on other ranks (the paper's tensor slice reordering).
With one node, or one rank on each, there is one hop, and one rounding.
Wang et al. 2023, arXiv:2306.10209, section 3.3. DeepSpeed: deepspeed/runtime/comm/coalesced_collectives.py,
`all_to_all_quant_reduce`, which reduces plainly within one node, vectors, and what 2 N does not divide.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from refimpl.comm.collectives import Op, Scratch
from refimpl.comm.group import Group
from refimpl.comm.work import Phase, Steps, Work
from refimpl.compress.compressor import Compressor, pack, unpack
from refimpl.zero.flat import Bucket
from refimpl.zero.reduction.loco import MovingErrors


class QuantisedSum:
    """Reduce-scatters [N * S] -> [S] over `far` x `near` ranks, `compressor` on the wire."""

    def __init__(
        self, near: Group, far: Group, compressor: Compressor, scratch: Scratch, feedback: MovingErrors | None = None
    ) -> None:
        self.near, self.far, self.compressor, self.scratch, self.feedback = near, far, compressor, scratch, feedback
        self._last: Work | None = None

    def reduce_scatter(self, bucket: Bucket, out: Tensor, x: Tensor, op: Op) -> Work:
        """Begin: x [N * S] of every rank -> out [S], this rank's chunk of the sum or the mean.

        The reduction before goes on to its second hop: at the same place on every rank.
        """
        if self._last is not None and not self._last.is_done:
            self._last.advance()
        self._last = Work(self._steps(bucket, out, x, op))
        return self._last

    def _steps(self, bucket: Bucket, out: Tensor, x: Tensor, op: Op) -> Steps:
        nodes, places = self.far.size, self.near.size
        by_place = x.view(nodes, places, -1).transpose(0, 1).reshape(places, -1)  # [P, n * S]
        column = yield from self._hop(self.near, bucket, "near", by_place)
        mine = yield from self._hop(self.far, bucket, "far", column.view(nodes, -1))
        out.copy_(mine / (nodes * places) if op == "mean" else mine)

    def _hop(self, group: Group, bucket: Bucket, name: str, rows: Tensor) -> Generator[Phase, None, Tensor]:
        """rows [G, m], row i for rank i -> the sum over ranks of the row that is this rank's, fp32 [m]."""
        if group.size == 1:
            return rows.view(-1).float()
        size = rows.shape[1]
        if self.feedback is None:
            wires = [self.compressor.compress(row) for row in rows.unbind()]
        else:
            wires = self.feedback.compress((bucket, name), rows)
        sent = torch.cat([pack(wire, rows.device) for wire in wires])
        received = self.scratch.take(sent.numel(), sent)
        yield lambda: [group.all_to_all(received, sent, async_op=True, tag=f"gradients {name}")]
        layout, total = self.compressor.layout(size, rows.dtype), torch.zeros(size, device=rows.device)
        for message in received.view(group.size, -1).unbind():
            self.compressor.add_to(total, unpack(message, layout))
        self.scratch.give(received)
        return total
