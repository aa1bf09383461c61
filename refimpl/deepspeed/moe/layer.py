"""DeepSpeed's layer, `MoE(hidden_size, expert, num_experts, ep_size, k, ...)`, by our gates and our dispatch.

    output, l_aux, exp_counts = moe(x)        l_aux: the load-balance loss, for the script to add to its own

With ep_size 1 it works by itself. With more it has to be told its ranks: `initialize` does it (`use_expert_ranks`), or,
without an engine, `set_deepspeed_parallelism`. Each rank then has num_experts / ep_size of the experts.

What is other than in DeepSpeed: ranks may have different numbers of tokens; without `drop_tokens` only tokens travel,
and not empty slots; `used_token` is heeded for every k, there for k = 1; ZeRO-3 trains it; and experts' names in a
state dict are those of the whole layer (`experts.py`). Tutel is never used.
DeepSpeed: deepspeed/moe/layer.py. Residual: Rajbhandari et al. 2022, arXiv:2201.05596, section 4.1.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.deepspeed.moe.experts import Experts
from refimpl.deepspeed.moe.sharded_moe import MOELayer, TopKGate
from refimpl.deepspeed.utils import groups
from refimpl.parallel.expert.marks import name_of

Ranks = Callable[[int], tuple[Group, Group]]  # ep_size -> (the ranks that share experts, those that have the same)


class MoE(nn.Module):
    """A mixture of `num_experts` copies of `expert`."""

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """expert: [.., hidden_size] -> the same, or a tuple that begins with it. All begin with its weights.

        k: experts of a token. capacity_factor: an expert has room for capacity_factor k T / num_experts of T tokens, at
        least min_capacity; without drop_tokens for all. use_rts: who is dropped is drawn (k = 1). use_residual: every
        token also passes through `expert` itself. enable_expert_tensor_parallelism: `expert` is cut over the tensor
        ranks. AssertionError if ep_size does not divide num_experts or the policy has no such name, ValueError for what
        a gate cannot do.
        """
        super().__init__()
        assert ep_size > 0, f"ep_size is {ep_size}: at least 1"
        assert num_experts % ep_size == 0, (
            f"Number of experts ({num_experts}) should be divisible by expert parallel size ({ep_size})"
        )
        assert noisy_gate_policy in (None, "None", "Jitter", "RSample"), (
            f"Unsupported noisy_gate_policy: {noisy_gate_policy}"
        )
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size, self.num_experts = ep_size, num_experts
        self.expert_group_name = name_of(ep_size)
        self.num_local_experts = num_experts // ep_size
        gate = TopKGate(
            hidden_size, num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy,
            drop_tokens, use_rts, None, top2_2nd_expert_sampling,
        )  # fmt: skip
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel=use_tutel
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Without an engine: those of the job. A collective. `use_data_before_..`: neighbours have the same experts."""
        self.use_expert_ranks(lambda ep: groups.expert_ranks(ep, use_data_before_expert_parallel_))

    def use_expert_ranks(self, ranks: Ranks) -> None:
        """The engine's: ranks(ep_size) -> (the ranks that share the experts, those that have the same ones)."""
        expert, expert_data = ranks(self.ep_size)
        axes = getattr(ranks, "axes", None) or groups.laid_out()
        groups.adopt_experts(expert, expert_data, axes.tensor.size if self.enable_expert_tensor_parallelism else 1)
        self.deepspeed_moe.use_ranks(expert, axes.tensor, self.enable_expert_tensor_parallelism)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x [.., M]; used_token: [..] or [T], 0 for tokens that go nowhere.

        -> (output [.., M]; l_aux, a scalar, fp32; tokens that came for each expert [num_experts], dropped ones too).
        """
        output: Tensor = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            beside: Any = self.mlp(hidden_states)
            beside = beside[0] if isinstance(beside, tuple) else beside  # Megatron's layers give a bias with it
            share = self.coefficient(hidden_states).softmax(-1)  # [.., 2]
            output = output * share[..., :1] + beside * share[..., 1:]
        l_aux, counts = self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
        assert l_aux is not None
        assert counts is not None
        return output, l_aux, counts
