"""What cards on mixtures of experts claim and no other test shows."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from worlds import run

from refimpl.comm.group import Group
from refimpl.comm.link import Link
from refimpl.model.experts import in_sources
from refimpl.model.gates import Routing, route
from refimpl.model.moe import mix, mix_dense
from refimpl.model.routes import balance_loss
from refimpl.parallel.expert.exchange import Flat, Hierarchical


def test_moving_by_one_hot_products_costs_the_cards_operations_and_sorting_none() -> None:
    from torch.utils.flop_counter import FlopCounterMode  # which imports triton: tests/kernels/conftest.py must first

    tokens, width, experts = 64, 8, 4
    x = torch.randn(tokens, width)
    for k in (1, 2):
        routes = route(torch.randn(tokens, experts), Routing(k=k, capacity_factor=1.0, min_capacity=1))
        for way, operations in ((mix_dense, 4 * k * tokens**2 * width), (mix, 0)):
            with FlopCounterMode(display=False) as counter:
                way(lambda rows, sizes: rows, x, routes)
            assert counter.get_total_flops() == operations


def test_the_balance_loss_has_its_gradient_through_the_probabilities_alone() -> None:
    counts = torch.tensor([5, 2, 1, 0])
    probs = torch.randn(8, 4).softmax(1).requires_grad_()
    (grad,) = torch.autograd.grad(balance_loss(probs, counts), probs)
    torch.testing.assert_close(grad, (4 * counts / 8 / 8).expand(8, 4))  # E f_e, of a mean over 8 tokens
    even = torch.tensor([2, 2, 2, 2])
    torch.testing.assert_close(balance_loss(probs, even), torch.tensor(1.0))


def test_nothing_but_the_softmax_brings_back_an_expert_that_nobody_chose() -> None:
    """Its own weights have no gradient; its logit has one where the bare probability is the weight, as in Switch."""
    experts = [nn.Linear(4, 4) for _ in range(3)]
    for k, reached in ((1, True), (2, False)):
        logits = torch.tensor([[3.0, 2.0, -3.0]] * 8, requires_grad=True)
        routes = route(logits, Routing(k=k))
        assert not (routes.indices == 2).any()
        answers = mix(
            lambda rows, sizes: in_sources(rows, sizes, lambda x, e: experts[e](x)), torch.randn(8, 4), routes
        )
        answers.square().sum().backward()
        assert experts[0].weight.grad is not None
        assert experts[2].weight.grad is None or not experts[2].weight.grad.any()
        assert logits.grad is not None
        assert logits.grad[:, 0].any()
        assert bool((logits.grad[:, 2].abs() > 1e-6).any()) is reached


def crossing(node: int) -> list[tuple[int, int]]:
    """Messages that this rank sends to other nodes, and their bytes: straight, and through the nodes."""
    group = Group.world()
    here, rows = group.rank // node, [[3] * group.size for _ in range(group.size)]
    x = torch.randn(3 * group.size, 5)
    straight, by_nodes = Flat(group), Hierarchical(group, node)
    assert torch.equal(straight(x, rows), by_nodes(x, rows))
    far = [rank for rank in range(group.size) if rank // node != here]
    bytes_ = group.ledger.sent_bytes("tag")["tokens between nodes"]
    return [(len(far), len(far) * 3 * 5 * 4), (by_nodes.across.size - 1, bytes_)]


def test_through_the_nodes_go_as_many_bytes_in_fewer_messages() -> None:
    for straight, by_nodes in run(crossing, 2, ranks=4):
        assert by_nodes[1] == straight[1]
        assert by_nodes[0] * 2 == straight[0]


def crossed(per_node: int) -> tuple[int, int]:
    """Bytes that this rank sends, all and to other domains: as many rows to each rank, itself included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFIMPL_RANKS_PER_NODE", str(per_node))
        group = Group.world(link=Link.parse("100GB/s"))
        Flat(group)(torch.randn(3 * group.size, 5), [[3] * group.size] * group.size)
    return sum(group.ledger.sent_bytes().values()), sum(group.ledger.crossed_bytes().values())


@pytest.mark.parametrize("near", [1, 2])
def test_of_even_tokens_the_share_of_the_far_peers_crosses(near: int) -> None:
    for sent, far in run(crossed, near, ranks=4):
        assert sent == 3 * 3 * 5 * 4
        assert far == sent * (4 - near) / (4 - 1)


def distance(averaged: bool) -> Tensor:
    """The difference of two experts' weights after 50 steps of Adam, each of them with tokens of its own."""
    torch.manual_seed(0)
    experts = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    begun = (experts[0].weight - experts[1].weight).detach()
    adam = torch.optim.Adam([e.weight for e in experts], lr=0.01)
    for _ in range(50):
        grads = [
            torch.autograd.grad((e(x) - aim * x).square().mean(), e.weight)[0]
            for e, aim, x in zip(experts, (1.0, -1.0), torch.randn(2, 16, 4), strict=True)
        ]
        for e, grad in zip(experts, grads, strict=True):
            e.weight.grad = (grads[0] + grads[1]) / 2 if averaged else grad
        adam.step()
    return (experts[0].weight - experts[1].weight).detach() - begun


def test_experts_that_learn_from_the_mean_of_strangers_keep_their_first_difference() -> None:
    assert distance(averaged=True).abs().max() < 1e-5
    assert distance(averaged=False).abs().max() > 0.1


def test_so_many_nodes_have_a_tokens_experts_on_average() -> None:
    for experts, nodes, k in ((8, 4, 3), (12, 3, 2), (8, 2, 4)):
        chosen = list(combinations(range(experts), k))
        mean = sum(len({e * nodes // experts for e in few}) for few in chosen) / len(chosen)
        formula = nodes * (1 - math.comb(experts - experts // nodes, k) / math.comb(experts, k))
        assert math.isclose(mean, formula)


def eight_bits_there(width: int) -> int:
    """Bytes of one way out in 8 bits with a scale for each 128, and one way back in 16, as the ledger has them."""
    group = Group.world()
    flat, rows = Flat(group), [[3] * group.size for _ in range(group.size)]
    for sent in (
        torch.zeros(3 * group.size, width, dtype=torch.uint8),
        torch.zeros(3 * group.size, width // 128),
        torch.zeros(3 * group.size, width, dtype=torch.bfloat16),
    ):
        flat(sent, rows)
    return sum(group.ledger.sent_bytes().values())


def test_rows_in_8_bits_there_and_in_16_back() -> None:
    width, ep = 256, 2
    for sent in run(eight_bits_there, width, ranks=ep):
        assert sent == 3 * ep * (ep - 1) / ep * ((width + 4 * width / 128) + 2 * width)
