"""1-bit LAMB: LAMB until its variance has settled; then one bit an element travels, and the ratios follow a fresh one.

warm-up, `freeze_step` steps    LAMB; c = coeff_beta c + (1 - coeff_beta) ratio   a parameter
after it, v and c frozen        m_r = beta1 m + (1 - beta1) g_r  on rank r;  m = compressed mean of the s m_r, over s
                                g = (m - beta1 m_before) / (1 - beta1);  w = beta2 w + (1 - beta2) g**2    w begins as v
                                f = max of (sqrt(v) + eps) / (sqrt(w) + eps), see `factor`
                                p -= lr * c * f * (m / (sqrt(v) + eps) + weight_decay * p)

s, one number a parameter, makes all momenta equally large at the freeze, so that one scale suits them all. The fresh
variance w costs no traffic: the mean gradient is found again in the momentum. With weight decay only the share
of f is taken that m's part has in the direction; f stays within factor_min and factor_max, and within
factor_threshold of the last step's. Bytes: as 1-bit Adam. State: 12 bytes a parameter, and the errors' 8 + 8/N.

`bias_correction` multiplies lr as in LAMB, by the count of all steps: the ratio has cancelled v's scale, so what is
left of the correction is a warm-up of the steps' length, and has nothing to do with the freeze. In f it corrects v and
w, each by the steps that it has seen: of two averages that began at 0 the older is larger for that alone. Without it,
as in the paper, losses alone in one process are those of DeepSpeed's class to 6e-6 over 400 steps of a GPT, 320 of
them frozen.
Li et al. 2021, arXiv:2104.06069, algorithm 1. DeepSpeed until 0.19.6: deepspeed/runtime/fp16/onebit/lamb.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from refimpl.optim.base import Moved
from refimpl.optim.lamb import denominator, direction, length, ratio, squared
from refimpl.optim.travelling import Backend, Travelling, least_one


class OneBitLamb(Travelling):
    """Under `DDP`, 1-bit LAMB. DeepSpeed's arguments and defaults. ValueError for what is out of range."""

    ratios: Sequence[float] = ()  # of the last step, one for each parameter that it moved

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: Backend = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        name = type(self).__name__
        least_one(name, freeze_step=freeze_step)
        if not (0 <= min_coeff <= max_coeff and 0 <= factor_min <= factor_max):
            raise ValueError(
                f"{name} needs 0 <= min_coeff <= max_coeff and 0 <= factor_min <= factor_max: {min_coeff=} "
                f"{max_coeff=} {factor_min=} {factor_max=}"
            )
        if not (0 <= coeff_beta < 1 and factor_threshold >= 0):
            raise ValueError(
                f"{name} needs coeff_beta in [0, 1), factor_threshold >= 0: {coeff_beta=} {factor_threshold=}"
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        options |= {"weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, options, bias_correction, amsgrad, cuda_aware, comm_backend_name)
        self.freeze_step, self.coeff_beta = freeze_step, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold

    @property
    def takes_mean_gradient(self) -> bool:
        return self.taken < self.freeze_step

    @property
    def lamb_freeze_key(self) -> bool:
        """Whether the variance is frozen; DeepSpeed's name for it."""
        return not self.takes_mean_gradient

    def get_lamb_coeffs(self) -> list[float]:
        """The last step's ratios, one for each parameter that it moved."""
        return list(self.ratios)

    def update(self, moved: Moved) -> None:
        super().update(moved)
        frozen = self.taken > self.freeze_step
        if frozen:
            self.average(moved)
        else:
            for p, group in moved:
                assert p.grad is not None
                self.moments(p, group, p.grad, variance=True)
        look, ratio_of = (self.frozen_look, self.frozen_ratio) if frozen else (self.warm_look, self.warm_ratio)
        looks = [look(p, group) for p, group in moved]
        rows = torch.stack(looks).tolist() if looks else []  # the host waits once
        self.ratios = [ratio_of(p, group, *row) for row, (p, group) in zip(rows, moved, strict=True)]
        for held, (p, group) in zip(self.ratios, moved, strict=True):
            p.sub_(direction(p, self.state[p], group).mul_(length(self.state[p]["step"], group) * held))
        if self.taken == self.freeze_step:
            self.freeze(moved)

    def warm_look(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """-> [2] fp64: |p| and |u|."""
        return torch.stack([squared(p), squared(direction(p, self.state[p], group))]).sqrt()

    def warm_ratio(self, p: Tensor, group: dict[str, Any], weights: float, whole: float) -> float:
        """LAMB's, which also goes into the average that is frozen later, where it is not 1 for want of a norm."""
        held = ratio(weights, whole, group)
        state = self.state[p]
        state.setdefault("lamb_coeff_freeze", 0.0)
        if held != 1:
            state["lamb_coeff_freeze"] = self.coeff_beta * state["lamb_coeff_freeze"] + (1 - self.coeff_beta) * held
        return held

    def freeze(self, moved: Moved) -> None:
        """The warm-up is over: begin a fresh variance, and say how much each momentum is to be scaled."""
        self.freeze_variance(moved)
        params = [p for group in self.param_groups for p in group["params"] if "exp_avg" in self.state[p]]
        roots = [float(squared(self.state[p]["exp_avg"]).sqrt()) / max(1, p.numel()) ** 0.5 for p in params]
        there = [root for root in roots if root > 0]
        for p, root in zip(params, roots, strict=True):
            self.state[p]["exp_avg_sq_fresh"] = self.state[p]["exp_avg_sq"].clone()
            self.state[p]["last_factor"] = 1.0
            self.state[p]["scaling_coeff"] = sum(there) / len(there) / root if root > 0 else 1.0

    def average(self, moved: Moved) -> None:
        """The momenta become their compressed means, and the mean gradients in them go into the fresh variances."""
        params, groups = [p for p, _ in moved], [group for _, group in moved]
        before, scaled = [], []
        for p, group in moved:
            assert p.grad is not None
            before.append(self.fresh(p, "exp_avg")["exp_avg"].clone())
            state = self.moments(p, group, p.grad, variance=False)
            scaled.append(state["exp_avg"].mul_(state.setdefault("scaling_coeff", 1.0)))
        self.mean(params, scaled, groups)
        for p, group, old in zip(params, groups, before, strict=True):
            state, (beta1, beta2) = self.fresh(p, "exp_avg_sq_fresh"), group["betas"]
            new = state["exp_avg"].div_(state["scaling_coeff"])
            grad = old.mul_(-beta1).add_(new).div_(1 - beta1)
            state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def frozen_look(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """-> [3] fp64: the largest frozen over fresh root, |u|, and that of it which is the momentum's.

        Without weight decay all of u is the momentum's, and nobody asks for the two norms.
        """
        state = self.state[p]
        roots = self.root(p, group) / self.root(p, group, "exp_avg_sq_fresh", "step")
        most = roots.max().double() if p.numel() else torch.ones((), dtype=torch.float64, device=p.device)
        if not group["weight_decay"]:
            return most.expand(3)
        ours = state["exp_avg"] / denominator(state["exp_avg_sq"], group)
        return torch.stack([most, squared(direction(p, state, group)).sqrt(), squared(ours).sqrt()])

    def frozen_ratio(self, p: Tensor, group: dict[str, Any], most: float, whole: float, ours: float) -> float:
        """c times this step's factor."""
        state = self.state[p]
        state["last_factor"] = now = self.factor(state, group, most, whole, ours)
        return float(state.setdefault("lamb_coeff_freeze", 0.0)) * now

    def factor(self, state: dict[str, Any], group: dict[str, Any], now: float, whole: float, ours: float) -> float:
        """How much longer steps may be than with the frozen variance."""
        if group["weight_decay"]:
            share = min(1.0, ours / whole) if whole else 1.0
            now = now * share + (1.0 - share)
        now = min(max(now, self.factor_min), self.factor_max)
        last = state.get("last_factor", 1.0)
        return float(min(max(now, last * (1 - self.factor_threshold)), last * (1 + self.factor_threshold)))
