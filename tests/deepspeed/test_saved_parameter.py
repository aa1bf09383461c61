"""A parameter that an `autograd.Function` saves and asks for in backward, as TRL's and Liger's fused losses do."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import worlds
from torch import Tensor, nn

import refimpl.deepspeed as deepspeed
from refimpl.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
WORDS, WIDTH = 11, 5


def gathered(weight: Any, is_sharded: bool) -> Any:
    """As TRL's `maybe_gather_lm_head_ctx`: what is there is not gathered, and above all not let go."""
    if not is_sharded or weight.ds_status == ZeroParamStatus.AVAILABLE:
        return nullcontext()
    return deepspeed.zero.GatheredParameters([weight])


class Head(torch.autograd.Function):
    """hidden [M, D] @ weight.T [D, V], of which backward reads the weight itself."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.is_sharded = hasattr(weight, "ds_id")
        with gathered(weight, ctx.is_sharded):
            ctx.save_for_backward(hidden, weight)
            return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        with gathered(weight, ctx.is_sharded):
            return grads[0] @ weight, grads[0].t() @ hidden if ctx.needs_input_grad[1] else None


class Net(nn.Module):
    """A loss that never calls the module of its head; `teacher`, which it does not own, has a head for the sum."""

    def __init__(self, tied: bool, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.head.weight.requires_grad_(not frozen)

    def forward(self, words: Tensor, teacher: "tuple[Net, ...]" = ()) -> Tensor:
        hidden = self.body(self.embed(words))
        logits = sum((Head.apply(hidden, net.head.weight) for net in teacher), Head.apply(hidden, self.head.weight))
        return F.cross_entropy(logits, words.roll(1))


def trained(tied: bool, frozen: bool, with_teacher: bool) -> list[float]:
    """Three losses of an engine, the same as those of plain torch on the same words."""
    rank = torch.distributed.get_rank()
    words = torch.randint(WORDS, (7,), generator=torch.Generator().manual_seed(rank))
    losses: dict[str, list[float]] = {}
    for which in ("plain", "engine"):
        model, teacher = Net(tied, frozen), Net(True, True).requires_grad_(False)
        others = (teacher,) if with_teacher else ()
        if which == "engine":
            engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
            deepspeed.initialize(model=teacher, config={k: v for k, v in CONFIG.items() if k != "optimizer"})
        losses[which] = []
        for _ in range(3):
            loss = (engine if which == "engine" else model)(words, others)
            losses[which].append(loss.item())
            if which == "engine":
                engine.backward(loss)
                engine.step()
                continue
            grads = torch.autograd.grad(loss, params := [p for p in model.parameters() if p.requires_grad])
            for p, grad in zip(params, grads, strict=True):
                torch.distributed.all_reduce(grad)
                p.data -= 0.1 * grad / torch.distributed.get_world_size()
    torch.testing.assert_close(losses["engine"], losses["plain"], rtol=1e-6, atol=0)
    return losses["engine"]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("with_teacher", [False, True], ids=["", "teacher"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_backward_reads_the_weight_that_forward_saved(tied: bool, frozen: bool, with_teacher: bool, ranks: int) -> None:
    for losses in worlds.run(trained, tied, frozen, with_teacher, ranks=ranks):
        assert losses[-1] < losses[0]


def test_a_tensor_of_no_parameter_of_zero_3_has_no_ds_id() -> None:
    weight = nn.Linear(2, 2).weight
    for tensor in (torch.ones(2), torch.ones(2, requires_grad=True), weight, weight.t(), nn.LazyLinear(2).weight):
        assert not hasattr(tensor, "ds_id")
