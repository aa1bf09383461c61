"""What cards claim of torch's own DDP and sampler, on 2 ranks over gloo; and of a rank that computes wrongly."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler
from worlds import run

from refimpl.comm.group import Group
from refimpl.ranks.errors import RankError
from refimpl.zero.ddp import DDP
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero3 import Zero3


@pytest.mark.parametrize(("n", "ranks"), [(10, 4), (12, 4), (7, 3)])
def test_the_sampler_repeats_samples(n: int, ranks: int) -> None:
    parts: list[list[int]] = [list(DistributedSampler(range(n), ranks, r, shuffle=False)) for r in range(ranks)]
    seen = Counter(i for part in parts for i in part)
    assert {len(part) for part in parts} == {-(-n // ranks)}
    assert sum(times == 2 for times in seen.values()) == -n % ranks
    assert len(seen) == n
    short: list[list[int]] = [
        list(DistributedSampler(range(n), ranks, r, shuffle=False, drop_last=True)) for r in range(ranks)
    ]
    assert n - len({i for part in short for i in part}) == n % ranks


def gradient_with_hook(divide: bool) -> tuple[float, float]:
    """The gradient that DDP leaves with a hook that all-reduces, and without one."""
    group = Group.world()
    gradients = []
    for hooked in (True, False):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buffer = bucket.buffer() / dist.get_world_size() if divide else bucket.buffer()
            work = dist.all_reduce(buffer, async_op=True)
            assert work is not None
            return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

        if hooked:
            model.register_comm_hook(None, hook)
        model(torch.tensor([[1.0 + group.rank]])).sum().backward()
        grad = model.module.weight.grad
        gradients.append(grad.item())
    return gradients[0], gradients[1]


def test_a_comm_hook_divides_itself() -> None:
    assert run(gradient_with_hook, True, ranks=2) == [(1.5, 1.5)] * 2
    assert run(gradient_with_hook, False, ranks=2) == [(3.0, 1.5)] * 2


def storages(as_view: bool) -> tuple[int, int]:
    """Storages that the gradients of DDP live in, and parameters."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), gradient_as_bucket_view=as_view)
    for _ in range(2):  # the buckets are rebuilt after the first step
        model.zero_grad(set_to_none=False)
        model(torch.ones(1, 8)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return len({g.untyped_storage().data_ptr() for g in gradients}), len(gradients)


def test_gradients_as_views_share_the_buckets_memory() -> None:
    assert run(storages, True, ranks=2) == [(1, 4)] * 2
    assert run(storages, False, ranks=2) == [(4, 4)] * 2


def bucket_orders(find_unused: bool) -> list[list[list[str]]]:
    """The parameters of each bucket, in its order, in three backwards; a bucket has room for one of the two."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    room, orders = layers[0].weight.nbytes / 2**20, []
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=room, find_unused_parameters=find_unused)
    names = {id(p): name for name, p in model.module.named_parameters()}

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        orders[-1].append([names[id(p)] for p in bucket.parameters()])
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(3):
        orders.append([])
        model(torch.ones(1, 4)).sum().backward()
    return orders


def test_buckets_are_rebuilt_in_the_order_of_the_first_backward() -> None:
    in_one, backwards = [["0.weight", "1.weight"]], [["1.weight"], ["0.weight"]]  # backward begins with the last layer
    assert run(bucket_orders, False, ranks=2) == [[in_one, backwards, backwards]] * 2
    assert run(bucket_orders, True, ranks=2) == [[backwards] * 3] * 2  # guessed, and kept


class Shared(nn.Module):
    """One layer in two re-entrant checkpoints, so that its gradient arrives twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def gradient_of_shared(wrap: dict[str, bool] | None) -> Tensor:
    """The layer's gradient after the second step; `wrap`: DDP's options, None for no DDP."""
    torch.manual_seed(0)
    module = Shared()
    model = module if wrap is None else DistributedDataParallel(module, **wrap)  # type: ignore[arg-type]
    x = torch.full((1, 4), 1.0 + Group.world().rank, requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    assert module.layer.weight.grad is not None
    return module.layer.weight.grad


def test_a_static_graph_may_use_a_layer_in_two_checkpoints() -> None:
    mean = torch.stack(run(gradient_of_shared, None, ranks=2)).mean(0)
    for gradient in run(gradient_of_shared, {"static_graph": True}, ranks=2):
        assert torch.allclose(gradient, mean)
    first, second = run(gradient_of_shared, {}, ranks=2)
    assert not torch.allclose(first, second), "only the first of two contributions was reduced, without a word"
    with pytest.raises(RankError, match="mark a variable ready only once"):
        run(gradient_of_shared, {"find_unused_parameters": True}, ranks=2)


def buffer_after_forward(wrapped: bool) -> float:
    """What a rank's buffer holds after a forward without gradients; it held the rank's number."""
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    with torch.no_grad():
        model.module.running_mean.fill_(5.0 + Group.world().rank)
        model.eval()
        (model if wrapped else model.module)(torch.ones(3, 2))
    return float(model.module.running_mean[0])


def test_a_forward_of_ddp_broadcasts_buffers() -> None:
    assert run(buffer_after_forward, True, ranks=2) == [5.0, 5.0], "it called a collective, also in evaluation"
    assert run(buffer_after_forward, False, ranks=2) == [5.0, 6.0]


def computed(model: nn.Module, micro: int, wrong: bool) -> Tensor:
    """The gradient of the first weight by one micro-batch; `wrong`: with one bit of it flipped, as by a broken unit."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(micro))
    gradient = torch.autograd.grad(model(x).square().mean(), next(model.parameters()))[0]
    if wrong:
        gradient.view(torch.int32)[0, 0] ^= 1 << 20
    return gradient


def with_one_that_computes_wrongly(stage: type[Stage], faulty: int) -> tuple[Tensor, list[bool]]:
    """Runs on every rank: its weight after a step, and on which micro-batches two ranks agree."""
    group = Group.world()
    rank, ranks = group.rank, group.size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3, bias=False))
    wrong = rank == faulty
    twice = [group.all_gather_object(computed(model, (rank + shift) % ranks, wrong).tolist()) for shift in (0, 1)]
    agree = [twice[0][micro] == twice[1][(micro - 1) % ranks] for micro in range(ranks)]
    own = computed(model, rank, wrong)
    trained = stage(model, torch.optim.AdamW(model.parameters(), lr=0.1), group)
    trained.backward((model(torch.eye(5)) * own.T).sum())  # whose gradient is `own`
    trained.step()
    return trained.full_parameter("0.weight"), agree


@pytest.mark.parametrize("stage", [DDP, Zero1, Zero3])
def test_a_rank_that_computes_wrongly_has_the_weights_of_all(stage: type[Stage]) -> None:
    """So no hash of weights tells; a micro-batch that two ranks compute does, and two of them name the rank."""
    right = run(with_one_that_computes_wrongly, stage, -1, ranks=3)[0]
    found = run(with_one_that_computes_wrongly, stage, 1, ranks=3)
    weights = [weight for weight, _ in found]
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert not torch.equal(weights[0], right[0])
    assert (right[1], found[0][1]) == ([True] * 3, [True, False, False])
    of_two = [{micro, (micro - 1) % 3} for micro, same in enumerate(found[0][1]) if not same]
    assert set.intersection(*of_two) == {1}


class Faulty(torch.optim.SGD):
    """Rank 0 gets the first number of what it updates wrong."""

    elementwise = True  # so that a stage takes it

    def step(self, closure: Any = None) -> Any:
        """Torch's, and the mistake."""
        super().step(closure)
        if Group.world().rank == 0:
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[0] += 1
        return None


def with_one_that_updates_wrongly(stage: type[Stage]) -> tuple[Tensor, Tensor]:
    """Runs on every rank: its weight after a step of such an optimizer, and after a right one."""
    model = nn.Sequential(nn.Linear(5, 3, bias=False))
    right = torch.ones(3, 5) - 0.1
    with torch.no_grad():
        model[0].weight.fill_(1)
    trained = stage(model, Faulty(model.parameters(), lr=0.1), Group.world())
    trained.backward(model(torch.eye(5)).sum())
    trained.step()
    return trained.full_parameter("0.weight"), right


@pytest.mark.parametrize("stage", [DDP, Zero1, Zero3])
def test_an_update_that_is_wrong_stays_where_it_is_made_only_under_ddp(stage: type[Stage]) -> None:
    found = run(with_one_that_updates_wrongly, stage, ranks=3)
    assert [torch.allclose(weight, right) for weight, right in found] == (
        [False, True, True] if stage is DDP else [False] * 3
    )
