"""DeepSpeed's gate and layer of experts, with our routes and our dispatch inside.

Where tokens may be dropped, every expert has the same number of slots, full or not, for every rank's tokens, as in
DeepSpeed: two all-to-alls of E C M (ep-1)/ep elements forward, two backward, each by `_AllToAll`. Where none is
dropped only tokens travel, k T M (ep-1)/ep elements: see `refimpl/parallel/expert/dispatch.py`.
DeepSpeed: deepspeed/moe/sharded_moe.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from refimpl.comm.group import Group
from refimpl.deepspeed import comm as dist
from refimpl.deepspeed.moe.experts import Experts
from refimpl.deepspeed.moe.gating import _capacity, answer, top1gating, top2gating, topkgating
from refimpl.deepspeed.utils.logging import logger
from refimpl.model.gates import JITTER, Routing, route
from refimpl.model.moe import mix
from refimpl.model.routes import Routes
from refimpl.parallel.expert.dispatch import Dispatch
from refimpl.parallel.expert.exchange import Flat, Table
from refimpl.parallel.expert.swap import sum_experts

__all__ = ["MOELayer", "TopKGate", "_AllToAll", "_capacity", "top1gating", "top2gating", "topkgating"]

TUTEL_INSTALLED = False  # and never used


def multiplicative_jitter(x: Tensor, device: torch.device | None = None, epsilon: float = JITTER) -> Tensor:
    """x times numbers between 1 - epsilon and 1 + epsilon."""
    return x * torch.empty_like(x).uniform_(1 - epsilon, 1 + epsilon) if epsilon else x


@dataclass
class Held:
    """Who a layer talks to. A copied layer talks to the same."""

    ep_group: ProcessGroup | None = None
    ranks: Group | None = None
    tensor: Group = field(default_factory=lambda: Group(None))
    cut_experts: bool = False

    def __deepcopy__(self, memo: object) -> "Held":
        return self


class TopKGate(nn.Module):
    """Which k of `num_experts` a token goes to. Its attributes may be changed at any time."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: ProcessGroup | None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """See `MoE`. ValueError for more experts a token than there are, and for capacities that make no sense."""
        super().__init__()
        self.held = Held()
        if not 1 <= k <= num_experts:
            raise ValueError(f"k={k}: a token takes at least one and at most all {num_experts} experts")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.ep_group = k, ep_group
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = min_capacity, noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        assert self.routing

    @property
    def routing(self) -> Routing:
        """The same in our words."""
        return Routing.deepspeed(
            self.k, self.capacity_factor, self.eval_capacity_factor, self.min_capacity, self.noisy_gate_policy,
            self.drop_tokens, self.use_rts, self.top2_2nd_expert_sampling,
        )  # fmt: skip

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The ranks whose fullest expert counts where nothing is dropped."""
        return self.held.ep_group

    @ep_group.setter
    def ep_group(self, ep_group: ProcessGroup | None) -> None:
        self.held.ep_group = ep_group

    def _set_ep_group(self, ep_group: ProcessGroup | None) -> None:
        self.ep_group = ep_group

    def forward(
        self,
        input: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
        as_routes: bool = False,
    ) -> Any:
        """input [T, M] -> what `gating.py` says; `as_routes`: our `Routes`."""
        with torch.autocast(input.device.type, enabled=False):
            x = input.float()
            if self.noisy_gate_policy == "Jitter" and self.training:
                x = multiplicative_jitter(x)
            routes = route(F.linear(x, self.wg.weight.float()), self.routing, self.training, used_token)
        most = len(x) if self.k == 1 else None
        return routes if as_routes else answer(routes, self.ep_group, sparse_routes, most)


class MOELayer(nn.Module):
    """A gate and this rank's experts."""

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        """gate: a `TopKGate`. experts: `Experts`, or any module [sources, experts, C, M] -> the same."""
        super().__init__()
        self.gate, self.experts = gate, experts
        self.ep_group_name, self.ep_size, self.num_local_experts = ep_group_name, ep_size, num_local_experts
        self.held = Held(ranks=Group(None) if ep_size == 1 else None)
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None
        self.use_tutel = False
        if use_tutel:
            logger.warning("use_tutel: Tutel is not used here; the layer's own dispatch is")

    def use_ranks(self, expert: Group, tensor: Group, cut_experts: bool) -> None:
        """expert: the ranks that share the experts; tensor: those that have the same tokens as this one.

        ValueError where there are not ep_size of them.
        """
        if expert.size != self.ep_size:
            raise ValueError(f"a layer of ep_size {self.ep_size} was given {expert.size} ranks to share its experts")
        self.held = Held(expert.handle, expert, tensor, cut_experts)
        if isinstance(self.gate, TopKGate):
            self.gate._set_ep_group(expert.handle)
        if tensor.size > 1 and not cut_experts:
            self.register_forward_pre_hook(partial(sum_experts, tensor))
        if isinstance(self.experts, Experts):
            self.experts.place(expert.rank)

    @property
    def ep_group(self) -> ProcessGroup | None:
        return self.held.ep_group

    def _set_ep_group(self, ep_group: ProcessGroup | None) -> None:
        self.use_ranks(Group(ep_group), self.held.tensor, self.held.cut_experts)

    def forward(self, x: Tensor, used_token: Tensor | None = None) -> Tensor:
        """x [.., M] -> [.., M]; used_token: [..] or [T]. A collective of all that share the experts.

        RuntimeError where the ranks were not said.
        """
        if self.held.ranks is None:
            raise RuntimeError(
                f"{self.ep_group_name}: these experts are shared by {self.ep_size} ranks, which were not said yet: "
                "call deepspeed.initialize, or set_deepspeed_parallelism of the MoE layer"
            )
        flat = x.reshape(-1, x.shape[-1])  # [T, M]
        used = None if used_token is None else used_token.flatten()
        routes: Routes = self.gate(flat, used, as_routes=True)
        self.l_aux, self.exp_counts = routes.balance, routes.counts
        ours = isinstance(self.experts, Experts)
        ranks, tensor = self.held.ranks, self.held.tensor
        if ranks.size == tensor.size == 1 and ours:
            return mix(self.experts, flat, routes).view_as(x)
        padded = routes.limit is not None or not ours
        dispatch = Slots(ranks, Flat(ranks), tensor, padded, self.held.cut_experts)
        return dispatch(self.experts if ours else partial(in_slots, self.experts), flat, routes).view_as(x)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which take no tensor that has a graph."""
        return {**self.__dict__, "l_aux": None, "exp_counts": None}


def in_slots(experts: nn.Module, rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Somebody's experts, which take slots [sources, experts, C, M]."""
    answers: Tensor = experts(rows.view(len(sizes), len(sizes[0]), -1, rows.shape[1]))
    return answers.reshape_as(rows)


class _AllToAll(torch.autograd.Function):
    """Equal parts of the first dimension to every rank of the group, and back."""

    @staticmethod
    def forward(ctx: Any, group: Group | ProcessGroup | None, input: Tensor) -> Tensor:
        ctx.group = group
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        if isinstance(group, Group):
            group.all_to_all(out, input.contiguous(), tag="tokens")
        else:
            dist.all_to_all_single(out, input.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _AllToAll.apply(ctx.group, *grads)  # type: ignore[no-untyped-call]


@dataclass
class Slots(Dispatch):
    """A dispatch whose slots, all equal, change ranks by DeepSpeed's function."""

    def move(self, x: Tensor, rows: Table) -> Tensor:
        if not self.padded or self.group.size == 1:
            return super().move(x, rows)
        moved: Tensor = _AllToAll.apply(self.group, x)  # type: ignore[no-untyped-call]
        return moved


def _route_slots(indices: Tensor, locations: Tensor, num_experts: int, capacity: int) -> Tensor:
    """experts, slots [k, T] -> the place of each route among num_experts x capacity, that number where dropped."""
    return torch.where(indices >= 0, indices.long() * capacity + locations.long(), num_experts * capacity)


def _sparse_encode(reshaped_input: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """x [T, M], places [k, T] -> [E, C, M], 0 where no token is."""
    width = reshaped_input.shape[1]
    buffer = reshaped_input.new_zeros(num_experts * capacity + 1, width)
    buffer = buffer.index_copy(0, slots.flatten(), reshaped_input.repeat(len(slots), 1))
    return buffer[:-1].view(num_experts, capacity, width)


def _sparse_decode(expert_output: Tensor, slots: Tensor, gates: Tensor, num_tokens: int) -> Tensor:
    """Answers [E C, M], places and weights [k, T] -> [T, M], added in the weights' dtype."""
    rows = torch.cat([expert_output, expert_output.new_zeros(1, expert_output.shape[1])])
    answers = rows.index_select(0, slots.flatten()).view(*slots.shape, -1)  # [k, T, M]
    return (answers * gates[:, :, None]).sum(0).to(expert_output.dtype)
