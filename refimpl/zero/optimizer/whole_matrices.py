"""Whole matrices of which every rank has a part: for Muon, whose step of an element depends on all of its matrix.

Each rank sends what it has of the averaged momentum, in bf16, and makes the steps of the matrices of which it has a
part: of most of them one rank alone, of one that lies across several ranks each of these. Of what comes out it keeps
its part. A bucket at a time, in memory of 2 bytes an element of it beside the parts of all. Traffic in a stage that
shards: 2 * (N - 1) / N bytes an element and step, half an fp32 all-gather of the weights; none where every rank has
all (DDP).
Liu et al. 2025, arXiv:2502.16982, algorithm 1 (Distributed Muon). DeepSpeed: in ZeRO-1 and 2 the whole gradient is
made orthogonal before it is cut, in ZeRO-3 matrix by matrix in turns: deepspeed/runtime/zero/stage3.py.
"""

import torch
from torch import Tensor

from refimpl.optim.muon import heads_of, made
from refimpl.zero.flat import Bucket
from refimpl.zero.optimizer.slices import Slices


class WholeMatrices:
    """Callable as `Muon.whole_matrices`."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices

    def __call__(self, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """What the slices `params` get of the steps of the matrices they are of, bf16. A collective.

        Every rank calls it once a step, also one on which nothing moves.
        """
        assert self.slices.optimizer is not None
        groups, update_of = self.slices.optimizer.param_groups, dict(zip(map(id, params), updates, strict=True))
        for bucket in self.slices.of:
            if groups[bucket.group_index]["use_muon"]:
                self._make(bucket, update_of)
        return [update_of[id(p)] for p in params]

    def _make(self, bucket: Bucket, update_of: dict[int, Tensor]) -> None:
        """Let `update_of` have what the slices of `bucket` get."""
        here = [s for s in self.slices.of[bucket] if id(s.param) in update_of]
        if self.slices.length[bucket] == bucket.padded:
            for s in here:
                assert s.whole is not None
                u = update_of[id(s.param)]
                update_of[id(s.param)] = made(u.to(bucket.device), heads_of(s.whole)).to(u.device)
            return
        full = torch.zeros(bucket.padded, dtype=torch.bfloat16, device=bucket.device)  # [P]
        mine = bucket.shard(full)  # [S]
        for s in here:
            mine[s.start : s.end] = update_of[id(s.param)]
        bucket.group.all_gather(full, mine, tag="matrices").wait()
        for s in here:
            assert s.whole is not None
            step = made(bucket.piece(full, s.whole), heads_of(s.whole))
            update_of[id(s.param)] = bucket.cut(step, s.whole, s.end - s.start).to(s.param.device, copy=True)
