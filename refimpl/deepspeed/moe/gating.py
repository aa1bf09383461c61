"""DeepSpeed's gates as functions of logits [T, E], by ours: who goes where is `refimpl.model.gates.route`'s to say.

    dense     (l_aux, combine weights [T, E, C] fp32, dispatch mask [T, E, C] bool, tokens that came [E])
    sparse    (l_aux, C, E, experts [k, T] int32, -1 where dropped, slots [k, T] int32, weights [k, T], as before)

Where nothing is dropped C is what the fullest expert of all ranks has: one all-reduce of 8 bytes.
DeepSpeed: deepspeed/moe/sharded_moe.py.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from refimpl.deepspeed import comm as dist
from refimpl.deepspeed.utils import groups
from refimpl.model.gates import Routing, route
from refimpl.model.routes import Routes, capacity_of

Answer = tuple[Any, ...]


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Answer:
    """Each token to one expert. used_token: [T], 0 for tokens that go nowhere."""
    noise = "RSample" if noisy_gate_policy == "RSample" else None
    routing = Routing.deepspeed(1, capacity_factor, capacity_factor, min_capacity, noise, drop_tokens, use_rts)
    return answer(route(logits, routing, True, used_token), ep_group, sparse_routes, most=len(logits))


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Answer:
    """Each token to two experts, of which the second may be drawn; the weights that are left add up to 1."""
    routing = Routing.deepspeed(
        2, capacity_factor, capacity_factor, min_capacity,
        drop_tokens=drop_tokens, top2_2nd_expert_sampling=top2_2nd_expert_sampling,
    )  # fmt: skip
    return answer(route(logits, routing), ep_group, sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    drop_policy: Literal["probs", "position"] = "probs",
    sparse_routes: bool = False,
) -> Answer:
    """Each token to k experts. drop_policy: those with the least probability, or the last. ValueError for another."""
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"Invalid drop_policy: {drop_policy!r}: it must be 'probs' or 'position'")
    factor = capacity_factor if drop_tokens else None
    routing = Routing(
        k=k, capacity_factor=factor, min_capacity=min_capacity, drop=drop_policy, normalize=True, balance="all"
    )
    return answer(route(logits, routing), ep_group, sparse_routes)


def answer(routes: Routes, ep_group: ProcessGroup | None, sparse: bool, most: int | None = None) -> Answer:
    """The routes as DeepSpeed's gates return them. `most`: no more slots than this where nothing is dropped."""
    slots = capacity(routes, ep_group, most)
    if not sparse:
        wide = replace(routes, limit=int(slots))
        return routes.balance, wide.combine(), wide.dispatch(), routes.counts
    indices = routes.indices.where(routes.kept, -1)
    places = [x.T.contiguous().int() for x in (indices, routes.slots)]
    return routes.balance, slots, routes.experts, *places, routes.weights.T.contiguous(), routes.counts


def capacity(routes: Routes, ep_group: ProcessGroup | None, most: int | None) -> Tensor:
    """Slots of an expert, [] int64. A collective of `ep_group` where nothing is dropped."""
    if routes.limit is not None:
        return routes.counts.new_full((), routes.limit)
    slots = routes.counts.max()
    if ep_group is not None and dist.get_world_size(group=ep_group) > 1:
        dist.all_reduce(slots, op=ReduceOp.MAX, group=ep_group)
    if groups._get_expert_model_parallel_world_size() == 1:  # each tensor rank is to get as many
        ranks = groups.laid_out().tensor.size
        slots = -(-slots // ranks) * ranks
    return slots if most is None else slots.clamp(max=most)


def _capacity(gates: Tensor, capacity_factor: Tensor, min_capacity: Tensor) -> Tensor:
    """gates [T, E] -> max(ceil(T / E x factor), least), [] int64."""
    return torch.tensor(capacity_of(gates.shape[0], gates.shape[1], float(capacity_factor), int(min_capacity)))
