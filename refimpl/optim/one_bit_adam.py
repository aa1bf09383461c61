"""1-bit Adam: Adam until its variance has settled, then momentum SGD with that variance, one bit an element travelling.

warm-up, `freeze_step` steps    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g**2     g: mean over ranks
after it                        m_r = beta1 m + (1 - beta1) g_r  on rank r;  m = compressed mean of the m_r;  v stays
both                            p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)

m is a linear function of the gradients, so what compression loses can be made up later; Adam with a v of compressed
gradients is not, and diverges. Bytes a step, Psi parameters on N ranks: 4 Psi (N-1)/N in fp16 during the warm-up, as
DDP; then Psi (N-1) / 4N, 1/16 of it, and the scales. 8 bytes of state a parameter, and the errors' 8 + 8/N: of the last
step and, in case the next is skipped, of the one before.
Tang et al. 2021, arXiv:2102.02888, algorithm 1. DeepSpeed until 0.19.6: deepspeed/runtime/fp16/onebit/adam.py, whose
first step only tries out the communication.
"""

from torch.optim.optimizer import ParamsT

from refimpl.optim.base import Moved
from refimpl.optim.travelling import Backend, Travelling, least_one


class OneBitAdam(Travelling):
    """Under `DDP`, 1-bit Adam; alone, Adam whose variance is frozen after `freeze_step` steps. DeepSpeed's arguments.

    ValueError for what is out of range.
    """

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
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: Backend = "nccl",
    ) -> None:
        least_one(type(self).__name__, freeze_step=freeze_step)
        options = {"lr": lr, "betas": betas, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        options |= {"weight_decay": weight_decay}
        super().__init__(params, options, bias_correction, amsgrad, cuda_aware, comm_backend_name)
        self.freeze_step = freeze_step

    @property
    def takes_mean_gradient(self) -> bool:
        return self.taken < self.freeze_step

    @property
    def adam_freeze_key(self) -> bool:
        """Whether the variance is frozen; DeepSpeed's name for it."""
        return not self.takes_mean_gradient

    def update(self, moved: Moved) -> None:
        super().update(moved)
        warm = self.taken <= self.freeze_step
        for p, group in moved:
            assert p.grad is not None
            self.moments(p, group, p.grad, variance=warm)
        if not warm:
            params, groups = [p for p, _ in moved], [group for _, group in moved]
            self.mean(params, [self.state[p]["exp_avg"] for p in params], groups)
        elif self.taken == self.freeze_step:
            self.freeze_variance(moved)
        for p, group in moved:
            p.sub_(self.adams(p, group).mul_(group["lr"]))
