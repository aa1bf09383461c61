"""0/1 Adam: the variance is brought up to date ever more rarely, one bit travels between, and later only now and then.

while t <= var_freeze_step    every k-th step as Adam, with the mean gradient in full precision; between them
                                  m = beta1 m + (1 - beta1) c,  c the compressed mean of the ranks' gradients
                              k doubles after each `var_update_scaler` such steps, from 1
after it, v frozen            m_r = beta1 m_r + (1 - beta1) g_r;  p_r -= lr * d_r;  u_r += lr * d_r      on rank r, with
                                  d_r = m_r / (sqrt(v) + eps) + weight_decay * p_r
                              and every h-th step the ranks meet, where they met before, at p_0:
                                  c = compressed mean of u_r * (sqrt(v) + eps)
                                  p = p_0 - c / (sqrt(v) + eps);  m = c / (sum of lr since then);  u_r = 0
                              h doubles after each `local_step_scaler` steps, from 1 to `local_step_clipper`

So bytes fall below one bit an element and step: a step in h sends Psi (N-1) / 4N and the scales, the others nothing.
Between two meetings the ranks' weights differ; `meet` ends that early, as for a checkpoint. State: 8 bytes a parameter,
8 more after the freeze (u and p_0), and the errors' 8 + 8/N.
Lu et al. 2022, arXiv:2202.06009, algorithm 1. DeepSpeed until 0.19.6: deepspeed/runtime/fp16/onebit/zoadam.py, which
finds p_0 again by subtracting u, so that ranks drift apart by what is rounded.
"""

import torch
from torch.optim.optimizer import ParamsT

from refimpl.optim.base import Moved
from refimpl.optim.travelling import Backend, Travelling, least_one

APART = ("momentum_accumulator", "met_at")  # u, p_0


class ZeroOneAdam(Travelling):
    """Under `DDP`, 0/1 Adam. DeepSpeed's arguments and defaults (32678 is theirs). ValueError for what is out of range.

    The counters k, h and their steps are options of the parameter groups, so that a checkpoint has them.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: Backend = "nccl",
    ) -> None:
        counts = {"var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler}
        counts |= {"local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper}
        least_one(type(self).__name__, **counts)
        options = {"lr": lr, "betas": betas, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        options |= {"weight_decay": weight_decay}
        options |= {"var_interval": 1, "var_counter": 0, "local_step_interval": 1, "local_step_counter": 0, "lrs": 0.0}
        super().__init__(params, options, bias_correction, amsgrad, cuda_aware, comm_backend_name)
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper

    @property
    def takes_mean_gradient(self) -> bool:
        step = self.taken + 1
        return step <= self.var_freeze_step and step % self.param_groups[0]["var_interval"] == 0

    def update(self, moved: Moved) -> None:
        super().update(moved)
        if self.taken <= self.var_freeze_step:
            self.step_together(moved)
        else:
            self.step_apart(moved)
            if self.taken % self.param_groups[0]["local_step_interval"] == 0:
                self.meet()
            self.count("local_step_counter", self.local_step_scaler, "local_step_interval", self.local_step_clipper)

    def step_together(self, moved: Moved) -> None:
        """While the variance is not frozen: the ranks' weights stay the same."""
        exact = self.taken % self.param_groups[0]["var_interval"] == 0
        params, groups = [p for p, _ in moved], [group for _, group in moved]
        grads = [p.grad for p in params if p.grad is not None]
        if not exact:
            for p in params:
                self.fresh(p, "exp_avg", "exp_avg_sq")
            self.mean(params, grads, groups)
        for p, group, grad in zip(params, groups, grads, strict=True):
            self.moments(p, group, grad, variance=exact)
            p.sub_(self.adams(p, group).mul_(group["lr"]))
        if exact:
            self.count("var_counter", self.var_update_scaler, "var_interval")
        if self.taken == self.var_freeze_step:
            self.freeze_variance(moved)

    def step_apart(self, moved: Moved) -> None:
        """With a frozen variance, on this rank alone."""
        for group in self.param_groups:
            group["lrs"] += float(group["lr"])
        for p, group in moved:
            assert p.grad is not None
            if "met_at" not in self.state[p]:
                self.fresh(p, "momentum_accumulator")["met_at"] = p.clone()
            state = self.moments(p, group, p.grad.masked_fill(self.fresh(p, "exp_avg_sq")["exp_avg_sq"] == 0, 0), False)
            d = self.adams(p, group).mul_(group["lr"])
            p.sub_(d)
            state["momentum_accumulator"].add_(d)

    @torch.no_grad()
    def meet(self) -> bool:
        """As the formula above; nothing where the ranks have not parted. A collective."""
        apart = [(p, g) for g in self.param_groups if g["lrs"] for p in g["params"] if "met_at" in self.state[p]]
        params, groups = [p for p, _ in apart], [group for _, group in apart]
        roots = [self.root(p, group) for p, group in apart]
        values = [self.state[p]["momentum_accumulator"].mul_(root) for p, root in zip(params, roots, strict=True)]
        if not any(group["lrs"] for group in self.param_groups):
            return False
        self.mean(params, values, groups)
        for p, group, root, c in zip(params, groups, roots, values, strict=True):
            state = self.state[p]
            p.copy_(state["met_at"]).sub_(c / root)
            state["exp_avg"].copy_(c).mul_(self.correction(p, group, group["betas"][0], "step") / group["lrs"])
            for key in APART:
                del state[key]
        for group in self.param_groups:
            group["lrs"] = 0.0
        return True

    def count(self, counter: str, times: int, interval: str, most: int | None = None) -> None:
        """One more; every `times`, the interval doubles, up to `most`."""
        for group in self.param_groups:
            group[counter] += 1
            if group[counter] == times:
                group[counter] = 0
                group[interval] = 2 * group[interval] if most is None else min(most, 2 * group[interval])
