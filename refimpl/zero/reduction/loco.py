"""LoCo: what qgZ's rounding loses comes back as a moving average, which itself rests in int8.

    v = x + e        wire = Q4(v)        e <- Q8(beta e + (1 - beta) (v - Q4(v)))        for each hop

With beta = 0 this is error feedback as everywhere; the average smooths errors that low precision makes noisy. Every
`reset_T` steps e is dropped, for it is of gradients at weights that have moved on. A skipped step drops it too (its
gradients were not finite), and when the loss scale changes, e changes with it, being an error of scaled gradients.
A checkpoint keeps it, bit for bit on as many ranks with the same nodes and units; on others it begins at zero.
Memory: 1 + 4/256 bytes a parameter for the first hop, that divided by P for the second.
Xie et al. 2024, arXiv:2407.04480. DeepSpeed: `all_to_all_loco_quant_reduce`, which counts tensors where it says steps,
and keeps e on the parameter (`intra_ef_buf`), where no checkpoint looks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.compress.blocks import Blocks
from refimpl.compress.compressor import Compressor, Wire
from refimpl.zero.config import LoCo
from refimpl.zero.flat import Bucket
from refimpl.zero.reduction.owing import place, warn_of_loss

Hop = tuple[Bucket, str]


class MovingErrors:
    """The errors of all buckets and hops, of each of the rows that this rank sends."""

    def __init__(
        self,
        group: Group,
        nodes: int,
        compressor: Compressor,
        options: LoCo,
        scale: Callable[[], float] = lambda: 1.0,
        units: Callable[[], Mapping[str, Bucket]] = dict,
    ) -> None:
        """`scale`: the loss scale at present. `units`: all that are reduced, by name: for checkpoints."""
        self.group, self.nodes, self.compressor, self.options = group, nodes, compressor, options
        self.scale, self.units = scale, units
        self.rest = Blocks(bits=8)
        self.kept: dict[Hop, list[Wire]] = {}
        self.steps = 0
        self._scale = 1.0  # what errors are measured in

    def compress(self, hop: Hop, rows: Tensor) -> list[Wire]:
        """rows [G, m] -> the wires of these and the errors so far; keeps the new errors."""
        self.measure()
        value = rows.to(torch.float32, copy=True)
        error = torch.zeros_like(value)
        for row, kept in zip(error, self.kept.get(hop, []), strict=False):
            self.rest.add_to(row, kept)
        wires = [self.compressor.compress(row) for row in value.add_(error)]
        for row, wire in zip(value, wires, strict=True):
            self.compressor.add_to(row, wire, -1.0)  # what is lost
        beta = self.options.err_beta
        self.kept[hop] = [self.rest.compress(row) for row in error.mul_(beta).add_(value, alpha=1 - beta)]
        return wires

    def measure(self) -> None:
        """Errors in the present loss scale."""
        if (now := self.scale()) != self._scale:
            for scales, _ in self.wires():
                scales.mul_(now / self._scale)
            self._scale = now

    def after_step(self, done: bool) -> None:
        """A step is over, or was skipped."""
        self.steps += 1
        if not done or self.steps % self.options.reset_T == 0:
            self.kept.clear()

    def state_dict(self) -> dict[str, Any]:
        """The errors of each hop, scales and codes of all its rows, measured in a loss scale of 1."""
        names = {unit: name for name, unit in self.units().items()}
        errors = [
            {
                "unit": names[unit], "elements": unit.padded, "hop": hop,
                "scales": torch.stack([scales for scales, _ in wires]) / self._scale,
                "codes": torch.stack([codes for _, codes in wires]),
            }
            for (unit, hop), wires in self.kept.items()
        ]  # fmt: skip
        return {**place(self.group), "steps": self.steps, "nodes": self.nodes, "errors": errors}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """The inverse; on other ranks, nodes or units errors begin at zero, with a warning. None: nothing was saved."""
        self.kept, self._scale, self.steps = {}, 1.0, 0 if state is None else state["steps"]
        if state is None:
            return
        units, here = self.units(), {**place(self.group), "nodes": self.nodes}
        sizes = {name: unit.padded for name, unit in units.items()}
        same_ranks = all(state[key] == value for key, value in here.items())
        if not same_ranks or any(sizes.get(saved["unit"]) != saved["elements"] for saved in state["errors"]):
            others = ", in other units" if same_ranks else ""
            there = f"{state['ranks']} ranks on {state['nodes']} nodes{others}"
            warn_of_loss(self.group, "zeropp_loco_param", there, f"{self.group.size} on {self.nodes}")
            return
        for saved in state["errors"]:
            scales, codes = (saved[part].to(self.group.device, copy=True).unbind() for part in ("scales", "codes"))
            self.kept[units[saved["unit"]], saved["hop"]] = list(zip(scales, codes, strict=True))

    def wires(self) -> list[Wire]:
        """All errors at rest."""
        return [wire for wires in self.kept.values() for wire in wires]

    def tensors(self) -> list[Tensor]:
        """Their memory."""
        return [part for wire in self.wires() for part in wire]
