"""Experts on several ranks against all of them on each: bits, gradients, bytes, unequal loads, tensor ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import run

from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.model.experts import Experts, StackedExperts
from refimpl.model.gates import Gate, Routing
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.moe import MoE, mixtures
from refimpl.parallel.expert.swap import expert_parallel, load_whole_state_dict, rebalance, whole_state_dict
from refimpl.parallel.styles import Columns, Rows
from refimpl.parallel.swap import match, swap
from refimpl.plan.expert import even_sent, hierarchical_sent, padded_sent, sent

WIDTH, EXPERTS = 16, 12
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # half the rows in a matrix product: some roundings
Found = dict[str, Any]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))


def build(routing: Routing, stacked: bool = False, experts: int = EXPERTS) -> MoE:
    torch.manual_seed(0)
    gate = Gate(WIDTH, experts, routing)
    return MoE(
        gate, StackedExperts(WIDTH, 40, experts, std=0.4) if stacked else Experts([mlp() for _ in range(experts)])
    )


def batch(feed: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens [T, M], and the gradient of what becomes of them."""
    generator = torch.Generator().manual_seed(feed)
    return torch.randn(tokens, WIDTH, generator=generator), torch.randn(tokens, WIDTH, generator=generator)


def passed(
    sizes: dict[str, int], ep: int, tokens: list[int], routing: Routing, how: dict[str, Any] | None = None,
    stacked: bool = False, skew: float = 0.0,
) -> Found:  # fmt: skip
    """Runs on every rank: output, gradients averaged over their groups, by names of the whole, and the traffic."""
    axes = Axes.of_sizes(sizes, Group.world()).with_experts(ep)
    layer = build(routing, stacked)
    if skew:
        with torch.no_grad():
            layer.gate.weight.mul_(0)
            layer.gate.weight[3, 0] = skew  # all tokens with a positive first number to expert 3
    expert_parallel(layer, axes, **(how or {}))
    x, out_grad = batch(axes.feed, tokens[axes.feed])
    if skew:
        x[:, 0] = x[:, 0].abs() + 1
    x.requires_grad_()
    axes.world.ledger.reset()
    torch.manual_seed(axes.feed)
    y = layer(x)
    assert layer.routes is not None
    (y * out_grad).sum().add(layer.routes.balance).backward()
    traffic, calls = axes.world.ledger.sent_bytes("tag"), axes.world.ledger.calls("op")
    table = axes.expert.all_gather_object(layer.routes.rows.sizes)
    local: dict[str, Tensor] = {}
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        is_expert = name.startswith("experts.")
        assert is_expert == (getattr(p, "allreduce", True) is False)
        assert not is_expert or p.group_name == f"ep_size_{ep}"
        (axes.expert_data if is_expert else axes.replicas).all_reduce(p.grad)
        p.grad /= axes.replicas.size
        local[name] = p.grad
    for (name, p), grad in zip(layer.named_parameters(), local.values(), strict=True):
        p.data = grad
        del name
    grads = {k: v for k, v in whole_state_dict(layer, axes.expert).items() if k != "gate.bias"}
    return {"y": y.detach(), "x": x.grad, "grads": grads, "traffic": traffic, "calls": calls, "table": table,
            "rank": axes.expert.rank}  # fmt: skip


def equal(ours: Found, theirs: Found, but: str = "none of them") -> bool:
    assert ours["grads"].keys() == theirs["grads"].keys()
    return all(torch.equal(ours[key], theirs[key]) for key in ("y", "x")) and all(
        torch.equal(ours["grads"][name], grad) for name, grad in theirs["grads"].items() if but not in name
    )


def close(ours: Found, theirs: Found) -> None:
    """Where a matrix product has other rows beside, empty ones or half as many: some roundings."""
    for key in ("y", "x"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-6)
    for name, grad in theirs["grads"].items():
        torch.testing.assert_close(ours["grads"][name], grad, rtol=1e-4, atol=1e-6)


DROPLESS, DROPS = Routing(k=2), Routing(k=2, capacity_factor=0.7, min_capacity=0, drop="choice")
ROUTINGS = [DROPLESS, DROPS, Routing.deepspeed(k=1), Routing(k=2, by="experts")]


@pytest.mark.parametrize("routing", ROUTINGS, ids=["dropless", "drops", "one at random", "by experts"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_ep_gives_the_bits_of_one(ranks: int, routing: Routing) -> None:
    tokens = [17, 9, 30, 4][:ranks]
    one = run(passed, {}, 1, tokens, routing, ranks=ranks)
    for ours, theirs in zip(run(passed, {}, ranks, tokens, routing, ranks=ranks), one, strict=True):
        assert equal(ours, theirs)


@pytest.mark.parametrize("stacked", [False, True], ids=["modules", "stacked"])
def test_two_pairs_add_in_another_order_unless_asked_for_the_exact_one(stacked: bool) -> None:
    tokens = [40, 25, 60, 33]
    one = run(passed, {}, 1, tokens, DROPLESS, {}, stacked, ranks=4)
    for ours, theirs in zip(run(passed, {}, 2, tokens, DROPLESS, {"exact": True}, stacked, ranks=4), one, strict=True):
        assert equal(ours, theirs)
    parts = [ours["grads"] for ours in run(alone, tokens, stacked, ranks=4)]
    for ours, theirs in zip(run(passed, {}, 2, tokens, DROPLESS, {}, stacked, ranks=4), one, strict=True):
        assert equal(ours, theirs, but="experts.")
        assert not equal(ours, theirs)
        for name, grad in theirs["grads"].items():
            bound = 2**-23 * 3 * sum(part[name].abs() for part in parts) / 4
            assert ((ours["grads"][name] - grad).abs() <= bound).all()


def alone(tokens: list[int], stacked: bool) -> Found:
    """Runs on every rank: its own gradients."""
    layer = build(DROPLESS, stacked)
    x, out_grad = batch(Group.world().rank, tokens[Group.world().rank])
    y = layer(x)
    assert layer.routes is not None
    (y * out_grad).sum().add(layer.routes.balance).backward()
    return {"grads": {name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", ["one gets all", "an empty batch", "all batches are empty"])
def test_unequal_loads(ranks: int, case: str) -> None:
    tokens = {"one gets all": [11, 5, 20, 8], "an empty batch": [11, 0, 20, 0], "all batches are empty": [0] * 4}[case]
    skew = 5.0 if case == "one gets all" else 0.0
    one = run(passed, {}, 1, tokens[:ranks], Routing(k=1), {}, False, skew, ranks=ranks)
    for padded in (False, True):
        found = run(passed, {}, ranks, tokens[:ranks], Routing(k=1), {"padded": padded}, False, skew, ranks=ranks)
        for ours, theirs in zip(found, one, strict=True):
            assert padded or equal(ours, theirs)
            close(ours, theirs)
        if case == "one gets all":
            assert [load[3] for load in found[0]["table"]] == tokens[:ranks]
            unused = [g for name, g in found[0]["grads"].items() if name.startswith("experts.") and ".3." not in name]
            assert not any(grad.any() for grad in unused)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_all_to_alls_each_way_and_not_a_byte_more(ranks: int) -> None:
    tokens = [17, 9, 30, 4][:ranks]
    for ours in run(passed, {}, ranks, tokens, DROPLESS, ranks=ranks):
        assert ours["calls"] == {"all_gather": 1, "all_to_all": 4}
        assert ours["traffic"] == sent(ours["table"], ours["rank"], WIDTH, 4)
    for ours in run(passed, {}, ranks, tokens, DROPS, {"padded": True}, ranks=ranks):
        capacity = -(-2 * 30 * 7 // (10 * EXPERTS)) if ranks > 2 else 2
        assert ours["calls"] == {"all_gather": 1, "all_to_all": 4}
        assert ours["traffic"] == padded_sent(EXPERTS, capacity, WIDTH, ranks, 4)


def test_even_loads_send_what_the_short_formula_says() -> None:
    tokens, k, ep = 96, 2, 4
    loads = [[tokens * k // EXPERTS] * EXPERTS] * ep
    assert sent(loads, 1, WIDTH, 2)["tokens"] == even_sent(tokens, k, WIDTH, ep, 2)
    inside, across = hierarchical_sent(loads, 1, 2, WIDTH, 2)
    assert inside == across == 4 * tokens * k * WIDTH * 2 // 2


def test_through_the_nodes_come_the_same_rows_in_fewer_messages() -> None:
    tokens = [17, 0, 30, 4]
    one = run(passed, {}, 1, tokens, DROPLESS, ranks=4)
    for node in (1, 2, 4):
        for ours, theirs in zip(run(passed, {}, 4, tokens, DROPLESS, {"node": node}, ranks=4), one, strict=True):
            assert equal(ours, theirs)
            inside, across = hierarchical_sent(ours["table"], ours["rank"], node, WIDTH, 4)
            assert ours["traffic"].get("tokens in the node", 0) == inside
            assert ours["traffic"].get("tokens between nodes", 0) == across
            assert ours["calls"] == {"all_gather": 1, "all_to_all": 8 if node == 2 else 4}
    with pytest.raises(Exception, match="3 ranks a node: a hierarchical all-to-all of 4 ranks has whole nodes"):
        run(passed, {}, 4, tokens, DROPLESS, {"node": 3}, ranks=4)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}], ids=str)
def test_beside_other_axes(sizes: dict[str, int]) -> None:
    """Tensor ranks hold the same tokens: each sends half of them. Context ranks hold others, as data ranks do."""
    tokens = [15, 22, 0, 9] if "cp" in sizes else [15, 22]
    feeds = [0, 0, 1, 1]
    one = run(passed, {}, 1, tokens[:2], DROPLESS, ranks=2)
    found = run(passed, sizes, 2, tokens[:2], DROPLESS, ranks=4)
    for rank, ours in enumerate(found):
        close(ours, one[feeds[rank]])
    for rank in (0, 2) if "tp" in sizes else ():
        pair = sum(ours["traffic"]["tokens"] for ours in found[rank : rank + 2])
        assert pair == sent(found[rank]["table"], found[rank]["rank"], WIDTH, 4)["tokens"]


def cut(ep: int, tokens: list[int]) -> Found:
    """Runs on every rank: experts cut into columns and rows over two tensor ranks."""
    axes = Axes.of_sizes({"tp": 2}, Group.world()).with_experts(ep)
    layer = build(DROPLESS, experts=4)
    plan = {"experts.*.0": Columns(), "experts.*.2": Rows()}
    swap(layer, match(plan, [name for name, _ in layer.named_modules() if name]), axes.tensor)
    expert_parallel(layer, axes, cut_experts=True)
    x, out_grad = batch(axes.feed, tokens[axes.feed])
    x.requires_grad_()
    y = layer(x)
    (y * out_grad).sum().backward()
    return {"y": y.detach(), "x": x.grad, "gate": layer.gate.weight.grad}


def test_experts_that_are_cut_themselves_see_all_tokens() -> None:
    tokens = [15, 1]
    layer = build(DROPLESS, experts=4)
    for rank, ours in enumerate(run(cut, 2, tokens, ranks=4)):
        x, out_grad = batch(rank // 2, tokens[rank // 2])
        x.requires_grad_()
        layer.zero_grad()
        y = layer(x)
        (y * out_grad).sum().backward()
        for key, theirs in (("y", y.detach()), ("x", x.grad), ("gate", layer.gate.weight.grad)):
            torch.testing.assert_close(ours[key], theirs, rtol=1e-5, atol=1e-5)


SHAPE = GPTConfig(vocab=32, context=8, width=WIDTH, layers=2, heads=2)


def trained(ep: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Runs on every rank: losses and whole weights of a GPT with mixtures after some steps of plain SGD."""
    axes = Axes.of_data(Group.world()).with_experts(ep)
    torch.manual_seed(axes.world.rank)  # other weights on each rank: the first's are taken
    model = mixtures(GPT(SHAPE), 4, Routing(k=2, bias=True), balance=0.02)
    expert_parallel(model, axes)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + axes.feed)
        ids = torch.randint(32, (3, 9), generator=generator)
        model.zero_grad()
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            group = axes.replicas if getattr(p, "allreduce", True) else axes.expert_data
            group.all_reduce(p.grad)
            p.data -= 0.1 * p.grad / axes.replicas.size
        rebalance(model, axes.replicas, 0.01)
        losses.append(loss.item())
    whole = {name: p.clone() for name, p in whole_state_dict(model, axes.expert).items()}
    before = {name: p.clone() for name, p in model.state_dict().items()}
    model.load_state_dict({name: torch.zeros_like(p) for name, p in before.items()})
    load_whole_state_dict(model, whole)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    return losses, whole


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gpt_trains_the_same_with_its_experts_dealt_out(ranks: int) -> None:
    one, other = run(trained, 1, 4, ranks=ranks), run(trained, ranks, 4, ranks=ranks)
    for (losses, weights), (their_losses, theirs) in zip(other, one, strict=True):
        assert losses == their_losses
        assert weights.keys() == theirs.keys()
        assert all(torch.equal(weights[name], theirs[name]) for name in theirs)
        assert all(torch.equal(weights[name], other[0][1][name]) for name in theirs)  # biases too, on every rank


@pytest.mark.parametrize(
    ("experts", "ep", "says"),
    [(3, 2, "3 experts cannot be dealt out to ep_size 2"), (4, 3, "ep_size 3: experts are dealt out to the 2 data")],
)
def test_what_cannot_be_dealt_out_is_named(experts: int, ep: int, says: str) -> None:
    def deal() -> None:
        expert_parallel(build(DROPLESS, experts=experts), Axes.of_data(Group.world()).with_experts(ep))

    with pytest.raises(Exception, match=says):
        run(deal, ranks=2)


def test_a_model_without_mixtures_is_refused() -> None:
    with pytest.raises(ValueError, match="GPT has no mixture of experts"):
        expert_parallel(GPT(SHAPE), Axes.of_data(Group.world()))


def sequence_shared() -> Found:
    """Runs on every rank: tensor ranks that have other tokens of the same sequences; gradients summed over them."""
    axes = Axes.of_sizes({"tp": 2}, Group.world()).with_experts(2)
    layer = build(DROPLESS)
    expert_parallel(layer, axes, sequence=True)
    x, out_grad = batch(axes.feed, 12)
    mine = slice(6 * axes.tensor.rank, 6 * axes.tensor.rank + 6)
    y = layer(x[mine])
    (y * out_grad[mine]).sum().backward()
    return {"y": y.detach(), "gate": layer.gate.weight.grad} | {
        name: p.grad for name, p in layer.experts.named_parameters()
    }


def test_under_sequence_parallelism_each_tensor_rank_sends_its_own_tokens() -> None:
    found = run(sequence_shared, ranks=4)
    layers = [build(DROPLESS) for _ in range(2)]
    for feed, layer in enumerate(layers):
        x, out_grad = batch(feed, 12)
        y = layer(x)
        (y * out_grad).sum().backward()
        torch.testing.assert_close(torch.cat([ours["y"] for ours in found[2 * feed : 2 * feed + 2]]), y, **CLOSE)
        for ours in found[2 * feed : 2 * feed + 2]:
            torch.testing.assert_close(ours["gate"], layer.gate.weight.grad, **CLOSE)
    for ours in found:
        for name, p in layers[0].experts.named_parameters():
            if name in ours:
                both = p.grad + layers[1].experts.get_parameter(name).grad
                torch.testing.assert_close(ours[name], both, **CLOSE)


def in_bf16() -> tuple[Tensor, dict[str, Tensor]]:
    """Runs on every rank: output, and this rank's experts' gradients."""
    axes = Axes.of_data(Group.world()).with_experts(Group.world().size)
    layer = build(DROPLESS).bfloat16()
    expert_parallel(layer, axes)
    x, out_grad = batch(axes.feed, 20)
    called: list[nn.Module] = []
    for expert in layer.experts.children():
        expert.register_forward_pre_hook(lambda expert, args: called.append(expert))
    y = layer(x.bfloat16())
    assert called == [*layer.experts.children()]
    (y * out_grad.bfloat16()).sum().backward()
    return y.detach().float(), {name: p.grad.float() for name, p in layer.experts.named_parameters()}


def test_in_bf16_an_expert_multiplies_the_rows_of_all_ranks_at_once() -> None:
    layer = build(DROPLESS).bfloat16().float()
    outs = []
    for feed in range(3):
        x, out_grad = batch(feed, 20)
        y = layer(x.bfloat16().float())
        (y * out_grad.bfloat16().float()).sum().backward()
        outs.append(y.detach())
    for (y, grads), expected in zip(run(in_bf16, ranks=3), outs, strict=True):
        torch.testing.assert_close(y, expected, rtol=0.03, atol=0.03)  # bf16 rounds by 0.004, several times
        for name, grad in grads.items():
            exact = layer.experts.get_parameter(name).grad
            assert (grad - exact).norm() <= 0.02 * exact.norm() + 1e-3
