"""Where inputs wait: bytes by formula, what ranks send by the ledger, bits by the plain run."""

import pytest
import torch
from torch import Tensor, nn
from worlds import run

from refimpl.activation.checkpoint import Checkpoint, Inputs
from refimpl.activation.home import TAG, Host, Partitioned, gathered_bytes, kept_bytes
from refimpl.comm.group import Group
from refimpl.launch import RankError


def block(seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Dropout(0.4), nn.Linear(7, 5)), torch.randn(3, 5)


def gradients(how: Checkpoint | None) -> list[Tensor]:
    """Of two blocks, one after the other, and of the input."""
    module, x = block()
    x.requires_grad_()
    torch.manual_seed(1)
    y = x * 1
    for _ in range(2):
        y = module(y) if how is None else how(module, y)
    y.square().sum().backward()
    return [g for t in (x, *module.parameters()) if (g := t.grad) is not None]


def partitioned(then_host: bool) -> tuple[bool, int, int, int]:
    """Whether the bits are the plain run's; bytes sent; bytes kept of an input; by formula."""
    group = Group.world()
    home = Partitioned(group, Host() if then_host else None)
    same = all(map(torch.equal, gradients(Checkpoint(home)), gradients(None)))
    _, x = block()
    before = group.ledger.sent_bytes("tag")[TAG]
    share = home.put(x)
    assert torch.equal(home.get(share), x)
    after = group.ledger.sent_bytes("tag")[TAG]
    Partitioned(group).put(torch.tensor([torch.nan, torch.inf]))  # the same on all, as when a step is to be skipped
    return same, before - 16 * (group.size - 1), share.mine.untyped_storage().nbytes(), after - before


@pytest.mark.parametrize("then_host", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_partitioned(ranks: int, then_host: bool) -> None:
    _, x = block()
    for same, sent, kept, once in run(partitioned, then_host, ranks=ranks):
        assert same
        assert kept == kept_bytes(x, ranks) == 4 * -(-15 // ranks)
        assert once == gathered_bytes(x, ranks)
        assert sent == 2 * gathered_bytes(x, ranks)  # two blocks; 16 bytes were the comparison of the first input


def alone() -> bool:
    return Partitioned(Group.world()).put(torch.ones(4)) is None


def test_alone_nothing_is_cut() -> None:
    assert run(alone, ranks=1) == [True]


def other_samples() -> None:
    home = Partitioned(group := Group.world())
    Checkpoint(home)(torch.sin, torch.full((4,), float(group.rank), requires_grad=True) * 1)


def test_neighbours_with_other_activations_are_refused() -> None:
    with pytest.raises(RankError, match="the 2 ranks of this group hold different ones"):
        run(other_samples, ranks=2)


def test_on_a_cpu_the_host_is_where_it_is() -> None:
    """No copy: the argument stays with autograd, which also sees it changed in place."""
    assert all(map(torch.equal, gradients(Checkpoint(Host())), gradients(None)))
    x = torch.ones(3, requires_grad=True) * 2
    assert Inputs([x], Host()).sent == {}


class Elsewhere:
    """A home that counts: stands for any."""

    def __init__(self) -> None:
        self.put_in, self.taken = 0, 0

    def put(self, x: Tensor, place: int = 0) -> bytes:
        self.put_in += 1
        return x.numpy().tobytes()

    def get(self, packed: bytes) -> Tensor:
        self.taken += 1
        return torch.frombuffer(bytearray(packed), dtype=torch.float32).view(3, 5)


def test_only_floating_point_arguments_of_the_outermost_go_home() -> None:
    home = Elsewhere()
    how = Checkpoint(home)
    module, x = block()

    def outer(x: Tensor, scale: nn.Parameter, rows: Tensor) -> Tensor:
        return how(module, x)[rows] * scale

    scale, rows = nn.Parameter(torch.ones(5)), torch.tensor([1, 2])
    torch.manual_seed(1)
    how(outer, x, scale, rows).sum().backward()
    assert (home.put_in, home.taken) == (1, 1)
    mine, scale.grad = scale.grad, None
    torch.manual_seed(1)
    (module(x)[rows] * scale).sum().backward()
    assert mine is not None
    assert scale.grad is not None
    assert torch.equal(mine, scale.grad)
