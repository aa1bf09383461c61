"""The gate: one small matrix that says which experts a token goes to, and how much each answer counts.

    logits = x W^T, in fp32 whatever the model has      E M FLOPs a token: nothing beside an expert's

Top-k: a token takes the k experts with the highest scores. Which get popular is up to training, and training makes the
popular ones better: left alone, routing collapses. Against it:

    a loss      that is least where load and probability are even (`routes.balance_loss`)
    noise       RSample: Gumbel noise on what is chosen by; Jitter: inputs times 0.99 to 1.01; "normal": learned
    a bias      on what is chosen by, not on the weights, raised for experts with too little (`rebalance`): no loss
    experts     that choose their tokens instead of being chosen: each has as many, and a token any number

With a k, a softmax and these options the gates of DeepSpeed are `Routing.deepspeed(...)`, those of Mixtral
`Routing(k=2)`, of Qwen-MoE `Routing(k=4, normalize=False)`, of DeepSeek-V3 `Routing(k=8, score="sigmoid", bias=True,
groups=8, top_groups=4, scale=2.5)`. Ties go to the expert with the lower number, on any device.

Noisy top-k: Shazeer et al. 2017, arXiv:1701.06538, section 2.1. Expert choice: Zhou et al. 2022, arXiv:2202.09368.
Bias: Wang et al. 2024, arXiv:2408.15664; groups: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
DeepSpeed: deepspeed/moe/sharded_moe.py, `TopKGate`, `top1gating`, `top2gating`, `topkgating`; moe/ep_router.py.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.model.routes import Drop, Routes, balance_loss, capacity_of, fill, fit, z_loss

JITTER = 1e-2
FEW = 8  # experts of a token that are found one after the other
WIDEST = 8192  # experts that the kernel takes
# What only tokens that choose can have, and its defaults.
OF_TOKENS = {"drop": "position", "normalize": None, "scale": 1.0, "second_sampled": False, "balance": "all",
             "bias": False, "groups": 1}  # fmt: skip


@dataclass(frozen=True)
class Routing:
    """How tokens are routed. Everything but the number of experts and the width."""

    k: int = 1
    by: Literal["tokens", "experts"] = "tokens"  # who chooses; by experts each takes factor k T / E tokens
    capacity_factor: float | None = None  # in training; None: nothing is dropped
    eval_capacity_factor: float | None = None
    min_capacity: int = 4
    drop: Drop = "position"
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool | None = None  # the kept weights of a token add up to 1; None: if k > 1
    scale: float = 1.0  # of the weights
    noise: Literal["RSample", "Jitter", "normal"] | None = None  # in training
    second_sampled: bool = False  # all choices but the first by logits with Gumbel noise, in evaluation too
    balance: Literal["first", "all"] = "all"  # choices that the load-balance loss counts
    bias: bool = False  # chosen by scores + a bias, see `rebalance`
    groups: int = 1  # experts in as many groups, of which a token ..
    top_groups: int = 1  # .. looks into the best few: by the sum of their two highest scores

    def __post_init__(self) -> None:
        if self.k < 1 or self.min_capacity < 0:
            raise ValueError(f"k={self.k}, min_capacity={self.min_capacity}: at least 1, at least 0")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups={self.top_groups} of groups={self.groups}: at least 1, at most all")
        for name, value in [("capacity_factor", self.capacity_factor), ("eval_..", self.eval_capacity_factor)]:
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: it must be above 0, or None to drop nothing")
        known = {"by": ("tokens", "experts"), "drop": get_args(Drop), "score": ("softmax", "sigmoid"),
                 "noise": ("RSample", "Jitter", "normal", None), "balance": ("first", "all")}  # fmt: skip
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(map(repr, values))}")
        told = [name for name, default in OF_TOKENS.items() if getattr(self, name) != default]
        told += ["noise='RSample'"] * (self.noise == "RSample")
        if self.by == "experts" and told:
            raise ValueError(f"by='experts' goes without {', '.join(told)}: these are for tokens that choose")

    @classmethod
    def deepspeed(
        cls,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        top2_2nd_expert_sampling: bool = True,
    ) -> "Routing":
        """What its `TopKGate` does with these arguments, which has rules of its own for k = 1, 2 and more."""
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ValueError(f"noisy_gate_policy is {noisy_gate_policy!r}: it must be None, 'Jitter' or 'RSample'")
        jitter = noisy_gate_policy == "Jitter"
        sampled = noisy_gate_policy == "RSample" and k == 1
        return cls(
            k=k,
            capacity_factor=capacity_factor if drop_tokens else None,
            eval_capacity_factor=eval_capacity_factor if drop_tokens else None,
            min_capacity=min_capacity,
            drop=("random" if use_rts else "position") if k == 1 else "choice" if k == 2 else "probs",
            noise="Jitter" if jitter else "RSample" if sampled else None,
            second_sampled=k == 2 and top2_2nd_expert_sampling,
            balance="first" if k == 2 else "all",
        )


class Gate(nn.Module):
    """Tokens [T, M] -> their `Routes`."""

    def __init__(self, width: int, experts: int, routing: Routing | None = None) -> None:
        """ValueError if a token is to take more experts than there are, or groups that do not divide them."""
        super().__init__()
        self.routing = routing or Routing()
        self.experts = experts
        check(self.routing, experts)
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.noise = nn.Parameter(torch.zeros(experts, width)) if self.routing.noise == "normal" else None
        self.bias: Tensor | None
        self.load: Tensor | None
        self.register_buffer("bias", torch.zeros(experts) if self.routing.bias else None)
        # Tokens of each expert since the last `rebalance`.
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64) if self.routing.bias else None, False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's Linear; no noise has been learned, no expert is preferred."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        for other in (self.noise, self.bias, self.load):
            if other is not None:
                nn.init.zeros_(other)

    def forward(self, x: Tensor, used: Tensor | None = None) -> Routes:
        """x [T, M] of any dtype; used: [T], 0 for tokens that go nowhere."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            if self.training and self.routing.noise == "Jitter":
                x = x * torch.empty_like(x).uniform_(1 - JITTER, 1 + JITTER)
            logits = F.linear(x, self.weight.float())
            if self.training and self.noise is not None:
                logits = logits + torch.randn_like(logits) * F.softplus(F.linear(x, self.noise.float()))
            routes = route(logits, self.routing, self.training, used, self.bias)
        if self.training and self.load is not None and torch.is_grad_enabled():
            self.load += routes.counts
        return routes

    def _apply(self, fn: Any, recurse: bool = True) -> "Gate":
        # The bias moves by a thousandth a step, which bf16 would lose: `model.bfloat16()` leaves it as it is.
        bias = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.bias is not None and self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self

    @torch.no_grad()
    def rebalance(self, rate: float = 1e-3, load: Tensor | None = None) -> None:
        """Once a step: bias + rate for experts that had less than the mean, - rate for those that had more.

        `load` [E]: of all ranks; by default this rank's own since the last call. ValueError without a bias.
        """
        if self.bias is None or self.load is None:
            raise ValueError("this gate has no bias: Routing(bias=True)")
        load = (self.load if load is None else load).double()
        self.bias += rate * (load.mean() - load).sign().to(self.bias.dtype)
        self.load.zero_()


def check(routing: Routing, experts: int) -> None:
    """ValueError if so many experts cannot be routed to so."""
    group = experts // routing.groups
    if experts % routing.groups or (routing.groups > 1 and group < 2):
        raise ValueError(f"{experts} experts do not make {routing.groups} equal groups of two or more")
    if routing.k > group * routing.top_groups:
        of = f" in {routing.top_groups} of {routing.groups} groups" if routing.groups > 1 else ""
        raise ValueError(f"k={routing.k}: a token cannot take that many of {group * routing.top_groups} experts{of}")


def route(
    logits: Tensor, routing: Routing, training: bool = True, used: Tensor | None = None, bias: Tensor | None = None
) -> Routes:
    """logits [T, E] fp32; bias [E], added to what is chosen by."""
    tokens, experts = logits.shape
    check(routing, experts)
    scores = logits.softmax(1) if routing.score == "softmax" else logits.sigmoid()
    factor = routing.capacity_factor if training else routing.eval_capacity_factor
    if routing.by == "experts":
        each = min(capacity_of(tokens, experts, (factor or 1.0) * routing.k, routing.min_capacity), tokens)
        return chosen_by_experts(scores, logits, each, used)
    limit = None if factor is None else capacity_of(tokens, experts, factor * routing.k, routing.min_capacity)
    indices = choose(logits.detach(), scores.detach(), routing, training, bias)
    probs = scores.gather(1, indices)
    kept, slots, counts = fit(indices, probs, experts, limit, routing.drop, used)
    weights = probs * kept
    if routing.k > 1 if routing.normalize is None else routing.normalize:
        least = torch.finfo(weights.dtype).eps if routing.score == "softmax" else 1e-20
        weights = weights / weights.sum(1, keepdim=True).clamp(min=least)
    if routing.scale != 1:
        weights = weights * routing.scale
    share = scores if routing.score == "softmax" else scores / scores.sum(1, keepdim=True)
    if routing.balance == "first":
        asked = torch.ones_like(kept[:, :1]) if used is None else used.bool()[:, None]
        balance = balance_loss(share, fill(indices[:, :1], asked, experts)[1])
    else:
        balance = balance_loss(share, counts, routing.k)
    return Routes(indices, weights, kept, slots, counts, limit, balance, z_loss(logits))


def choose(logits: Tensor, scores: Tensor, routing: Routing, training: bool, bias: Tensor | None) -> Tensor:
    """-> [T, k] int64: each token's experts, the best first."""
    by = scores
    if training and routing.noise == "RSample":
        by = logits + gumbel(logits)
    if bias is not None:
        by = by + bias
    if routing.groups > 1:
        grouped = by.view(len(by), routing.groups, by.shape[1] // routing.groups)
        best = highest(grouped.topk(2)[0].sum(2), routing.top_groups)
        out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=by.device).scatter(1, best, False)
        by = grouped.masked_fill(out[:, :, None], -torch.inf).flatten(1)
    if not routing.second_sampled or routing.k == 1:
        return highest(by, routing.k)
    first = highest(by, 1)
    others = (logits + gumbel(logits)).scatter(1, first, -torch.inf)
    return torch.cat([first, highest(others, routing.k - 1)], 1)


def highest(x: Tensor, k: int) -> Tensor:
    """[T, E] -> [T, k]: where the highest are, in order; of equal ones the first. torch's topk would take any."""
    if k == 1:
        return x.argmax(1, keepdim=True)
    if not 1 < k <= FEW:
        return x.argsort(dim=1, descending=True, stable=True)[:, :k]
    if x.is_cuda and x.shape[1] <= WIDEST:
        from refimpl.kernels.topk_gate import topk_gate  # which a CPU has no use for

        return topk_gate(x.detach(), k)[1]  # one launch for 2 k; of probabilities as of logits, the highest
    # A third of the sort's time. What is taken becomes -inf, below all that is not.
    left, found = x.clamp(min=torch.finfo(x.dtype).min), []
    for _ in range(k):
        found.append(left.argmax(1, keepdim=True))
        left.scatter_(1, found[-1], -torch.inf)
    return torch.cat(found, 1)


def gumbel(like: Tensor) -> Tensor:
    """-log(-log(u)): the highest of logits with this noise is a draw from their softmax."""
    numbers = torch.finfo(like.dtype)
    low, high = numbers.tiny, 1 - numbers.eps
    return -(-(low + torch.rand_like(like) * (high - low)).log()).log()


def chosen_by_experts(scores: Tensor, logits: Tensor, limit: int, used: Tensor | None) -> Routes:
    """Each expert takes the `limit` tokens that score highest with it. A route for each expert, of which few are kept.

    What a token gets depends on the tokens after it: not for a model that generates.
    """
    by = scores.detach() if used is None else scores.detach().masked_fill(~used.bool()[:, None], -torch.inf)
    chosen = torch.zeros_like(scores, dtype=torch.bool).T  # [E, T]
    chosen = chosen.scatter(1, highest(by.T, limit), True).T & (by > -torch.inf)
    indices = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    slots, counts = fill(indices, chosen, scores.shape[1])
    return Routes(indices, scores * chosen, chosen, slots, counts, limit, z=z_loss(logits))
