"""Muon: nearly orthogonal steps, torch's Muon beside it, and who is moved by AdamW."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refimpl.optim.muon import Muon, made, orthogonal


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(24, 24), (16, 60), (60, 16), (3, 20, 40)])
def test_it_has_the_directions_of_the_gradient_and_makes_them_equally_long(shape: tuple[int, ...]) -> None:
    u, s, vt = torch.linalg.svd(drawn(*shape), full_matrices=False)
    g = u @ torch.diag(torch.logspace(-1, 1, s.shape[-1])) @ vt  # the longest is 100 times the shortest
    seen = u.mT @ orthogonal(g).float() @ vt.mT  # diagonal, if it has the same directions
    lengths = seen.diagonal(dim1=-2, dim2=-1)
    assert 0.6 < lengths.min() < lengths.max() < 1.25
    assert (seen - torch.diag_embed(lengths)).abs().max() < 0.1
    if g.ndim == 3:  # each by itself, also one whose gradient is small beside the others'
        scales = torch.tensor([1.0, 1e-3, 1e3])[:, None, None]
        torch.testing.assert_close(orthogonal(scales * g), torch.stack([orthogonal(one) for one in scales * g]))


@pytest.mark.parametrize("shape", [(24, 24), (16, 60), (60, 16)])
def test_it_goes_where_torchs_goes(shape: tuple[int, int]) -> None:
    """Which multiplies in another order: bf16 rounds otherwise."""
    ours, torchs = (nn.Parameter(drawn(*shape)) for _ in range(2))
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    pairs = [(ours, Muon([ours], **options)), (torchs, torch.optim.Muon([torchs], **options))]  # type: ignore[arg-type]
    for step in range(4):
        for p, optimizer in pairs:
            p.grad = drawn(step + 1, *shape)[-1].clone()
            optimizer.step()
            assert torch.equal(p.grad, drawn(step + 1, *shape)[-1]), "nobody's gradient is written to"
    way = (torchs - drawn(*shape)).norm()
    assert (ours - torchs).norm() < 0.02 * way


def test_a_convolution_is_a_matrix_of_its_filters() -> None:
    g = drawn(6, 3, 8, 2)
    assert torch.equal(made(g), 2 * orthogonal(g.view(6, 48)).view_as(g))


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (2, 3, 3, 0)])
def test_a_matrix_of_no_elements_makes_a_step_of_none(shape: tuple[int, ...]) -> None:
    assert made(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_what_is_no_matrix_is_adams(adam_w_mode: bool) -> None:
    ours, torchs = (nn.Parameter(drawn(37)) for _ in range(2))
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    theirs = kind([torchs], lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1, fused=True)
    for p, optimizer in ((ours, Muon([ours], weight_decay=0.1, adam_w_mode=adam_w_mode)), (torchs, theirs)):
        for step in range(3):
            p.grad = drawn(step + 1, 37)[-1].clone()
            optimizer.step()
    assert torch.equal(ours, torchs)


def test_groups_and_rates() -> None:
    matrix, head, bias = nn.Parameter(drawn(3, 3)), nn.Parameter(drawn(5, 3)), nn.Parameter(drawn(3))
    head.use_muon = False  # type: ignore[attr-defined]

    def groups(optimizer: Muon) -> list[tuple[bool, float, list[Tensor]]]:
        return [(g["use_muon"], g["lr"], g["params"]) for g in optimizer.param_groups]

    every = [bias, matrix, head]
    assert groups(Muon(every)) == [(True, 0.02, [matrix]), (False, 3e-4, [bias, head])]
    assert groups(Muon(every, lr=0.1, adam_lr=0.3)) == [(True, 0.1, [matrix]), (False, 0.3, [bias, head])]
    said = Muon([{"params": [matrix], "use_muon": False}, {"params": every[2:], "use_muon": True, "lr": 1.0}])
    assert groups(said) == [(False, 3e-4, [matrix]), (True, 1.0, [head])]
    # As many groups on a pipeline stage that has vectors alone, and for an empty group, as elsewhere.
    assert groups(Muon([("bias", bias)])) == [(True, 0.02, []), (False, 3e-4, [bias])]
    assert len(Muon([{"params": every}, {"params": every[:0]}]).param_groups) == 4
    copied = deepcopy(Muon([matrix], muon_lr=0.1))
    copied.add_param_group({"params": [nn.Parameter(drawn(2, 2))]})
    assert [g["lr"] for g in copied.param_groups] == [0.1, 3e-4, 0.1, 3e-4]
    vectors: list[Any] = [bias, ("bias", bias)]
    for vector in vectors:
        with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) is no matrix: give it use_muon=False"):
            Muon([{"params": [vector], "use_muon": True}])
    with pytest.raises(ValueError, match="a complex matrix would lose its imaginary part"):
        Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="a momentum in"):
        Muon(every, momentum=1.0)
    with pytest.raises(ValueError, match="gram and standard: ns_method='quintic'"):
        Muon(every, ns_method="quintic")  # type: ignore[arg-type]


def test_a_step_with_a_closure_at_each_groups_rate() -> None:
    still, moved, low = nn.Parameter(drawn(3, 3)), nn.Parameter(drawn(5, 3)), nn.Parameter(drawn(3).bfloat16())
    optimizer = Muon([{"params": [moved]}, {"params": [still], "lr": 0.0}, {"params": [low]}])

    def closure() -> float:
        loss = still.square().sum() + moved.square().sum() + low.float().square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) > 0
    assert torch.equal(still, drawn(3, 3))
    assert not torch.equal(moved, drawn(5, 3))
    assert optimizer.state[low]["step"].dtype == torch.float32, "bf16 counts to 256"


def test_each_head_is_a_matrix_of_its_own() -> None:
    u = drawn(24, 16)
    assert torch.equal(made(u, 3), torch.cat([made(part) for part in u.split(8)]))
    assert not torch.equal(made(u, 3), made(u))
    p = nn.Parameter(torch.zeros(24, 16))
    p.muon_num_heads = 3  # type: ignore[attr-defined]
    p.grad = u
    Muon([p], lr=1.0, momentum=0.0).step()
    assert torch.equal(p.detach(), -made(u, 3).float())
    p.muon_num_heads = 5  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"muon_num_heads=5 does not divide the rows of \(24, 16\)"):
        Muon([p])


@pytest.mark.parametrize("heads", [-1, 2.0, "2"])
def test_heads_are_a_number_of_them(heads: Any) -> None:
    p = nn.Parameter(torch.zeros(4, 4))
    p.muon_num_heads = heads  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=rf"muon_num_heads={heads!r} does not divide the rows of \(4, 4\)"):
        Muon([p])


def test_a_convolution_has_no_heads() -> None:
    p = nn.Parameter(torch.zeros(4, 4, 2, 2))
    p.muon_num_heads = 2  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="muon_num_heads=2 does not divide"):
        Muon([p])
