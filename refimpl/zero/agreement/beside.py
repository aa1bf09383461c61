"""A stage beside other axes of ranks: those with other parts of the model, and those with the same shards.

See `Beyond` for the first, as in a pipeline or with tensor parallelism. The second read other data: HSDP.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from refimpl.comm.first import take_first
from refimpl.comm.group import Group
from refimpl.zero.agreement.beyond import Beyond, Spans
from refimpl.zero.loop.access import ByName
from refimpl.zero.parameter import DATA


class Beside(ByName):
    """A part of `Stage`."""

    def spans(
        self, group: Group, counted_elsewhere: Iterable[nn.Parameter] | Mapping[nn.Parameter, Spans | None] = ()
    ) -> None:
        """The ranks of `group` hold other parts of the model: the gradient's norm and what follows are of all parts.

        Clipping is by `ZeroConfig.gradient_clipping` then. counted_elsewhere: this rank's copies of parameters that
        another part's rank counts, or what of each is such a copy (None: all of it). On all these ranks, before the
        first step.
        """
        copies = counted_elsewhere if isinstance(counted_elsewhere, Mapping) else dict.fromkeys(counted_elsewhere)
        self.update.beyond, self.view.parted = Beyond(group, copies), True

    def replicate(self, group: Group) -> None:
        """The ranks of `group` have the same shards and read other data: their gradients are averaged too.

        State is then divided over this stage's own group alone, and gathered in it: shard inside a node, replicate
        across (HSDP; MiCS, Zhang et al. 2022, arXiv:2205.00119). Sends 2 n (R-1)/R more of n owned bytes a backward.
        The first of these ranks' weights and buffers are taken by all. Before the first step, on all ranks. torch:
        FSDP2 over a mesh of two dimensions.
        """
        self.gradients.across = self.update.across = self.buffers.across = group
        self.take_weights(group, tag="parameters")

    @torch.no_grad()
    def take_weights(self, group: Group, tag: str) -> None:
        """The weights and buffers of the first rank of `group`, on all of its ranks.

        Each brings what it owns; so it is a collective of this stage's own ranks too.
        """
        for bucket in dict.fromkeys(self.home(p) for p in self.names):
            if bucket is not None:
                flat = self.weights(bucket)
                group.broadcast(flat, tag=tag)
                self.put_weights(bucket, flat)
        take_first([*(DATA.__get__(p) for p in self.names if self.home(p) is None), *self.model.buffers()], group, tag)
        self.gather()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients since the last step to this global norm, now; returns the norm before. A collective.

        RuntimeError where the model's other parts are on other ranks: see `spans`.
        """
        return nn.utils.clip_grad_norm_(self._reduced("clip_grad_norm_"), max_norm, norm_type)

    def norm_now(self) -> Tensor:
        """The global L2 norm of the gradients since the last step, times fp16's loss scale. A collective.

        RuntimeError as for `clip_grad_norm_`; there the step's own norm is of all parts.
        """
        grads = [grad for p in self._reduced("norm_now") if (grad := p.grad) is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def _reduced(self, asked: str) -> list[nn.Parameter]:
        """What is trained, with the gradients of all ranks."""
        if self.view.parted:
            raise RuntimeError(f"{asked} sees this rank's part of the model: set ZeroConfig.gradient_clipping")
        self.passes.settle()
        self.gradients.finish()  # reduces what a backward has kept
        return [p for p in self.gradients.bucket_of if p.requires_grad]
