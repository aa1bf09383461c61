"""Gates against the dense algorithms of GShard and Switch, written out with one-hot matrices and loops."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from refimpl.model.gates import FEW, Gate, Routing, chosen_by_experts, gumbel, highest, route
from refimpl.model.routes import Routes, balance_loss, capacity_of


def logits_of(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def by_loops(logits: Tensor, k: int, limit: float, drop: str, priority: Tensor, normalize: bool) -> Tensor:
    """[T, E, C] of a top-k gate, token by token. priority [T, E]: who is kept of those that want an expert."""
    tokens, experts = logits.shape
    probs = logits.softmax(1)
    wants = [sorted(range(experts), key=lambda e: -probs[t, e].item())[:k] for t in range(tokens)]
    combine = torch.zeros(tokens, experts, int(min(limit, tokens)) if limit != math.inf else tokens)
    if drop == "choice":
        order = [(t, wants[t][j]) for j in range(k) for t in range(tokens)]
    else:
        order = [(t, e) for t in range(tokens) for e in sorted(wants[t])]
    if drop in ("probs", "random"):
        kept: set[tuple[int, int]] = set()
        for e in range(experts):
            who = sorted((t for t in range(tokens) if e in wants[t]), key=lambda t: -priority[t, e].item())
            kept |= {(t, e) for t in who[: int(min(limit, tokens))]}
        order = [pair for pair in order if pair in kept]
    full: Counter[int] = Counter()
    for t, e in order:
        if full[e] < limit:
            combine[t, e, full[e]] = probs[t, e]
            full[e] += 1
    return combine / combine.sum((1, 2), keepdim=True).clamp(min=1e-30) if normalize else combine


@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([0.3, 1.0, 1.7, None]),
    st.integers(0, 3),
    st.sampled_from(["position", "choice", "probs", "random"]),
    st.integers(0, 1000),
)
@settings(max_examples=30)
@example(12, 3, 2, 0.3, 0, "position", 1)
@example(12, 3, 2, 0.3, 0, "choice", 1)
@example(12, 3, 2, 0.3, 0, "probs", 1)
@example(12, 3, 2, 0.3, 0, "random", 1)
def test_a_top_k_gate_is_the_loop_over_its_tokens(
    tokens: int, experts: int, k: int, factor: float | None, least: int, drop: str, seed: int
) -> None:
    k = min(k, experts)
    logits = logits_of(tokens, experts, seed)
    routing = Routing(k=k, capacity_factor=factor, min_capacity=least, drop=drop)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    routes = route(logits, routing)
    torch.manual_seed(seed)
    priority = torch.rand(tokens, experts) if drop == "random" else logits.softmax(1)
    limit = math.inf if factor is None else max(math.ceil(torch.tensor(factor * k) * (tokens / experts)), least)
    expected = by_loops(logits, k, limit, drop, priority, k > 1)
    ours = routes.combine()
    size = max(ours.shape[2], expected.shape[2])
    ours, expected = (torch.nn.functional.pad(x, (0, size - x.shape[2])) for x in (ours, expected))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert torch.equal(routes.dispatch().any(2).sum(), routes.kept.sum())
    assert routes.counts.sum() == tokens * k
    assert limit == math.inf or (routes.limit == routes.capacity == limit >= max(routes.rows.sizes))


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 1000))
def test_rows_are_the_kept_routes_sorted_by_expert(tokens: int, experts: int, k: int, drops: bool, seed: int) -> None:
    k = min(k, experts)
    routes = route(logits_of(tokens, experts, seed), Routing(k=k, capacity_factor=0.5 if drops else None))
    rows = routes.rows
    flat = routes.indices.flatten()[rows.route]
    assert flat.tolist() == sorted(flat.tolist())
    assert rows.sizes == [int((routes.indices[routes.kept] == e).sum()) for e in range(experts)]
    assert torch.equal(rows.place.flatten()[rows.route], torch.arange(len(rows.route)))
    assert (rows.place[~routes.kept] == len(rows.route)).all()


def test_tokens_that_are_not_used_go_nowhere_and_count_nowhere() -> None:
    logits, used = logits_of(20, 4), torch.arange(20) % 3 != 0
    for drop in ("position", "random", "probs", "choice"):
        routing = Routing(k=2, capacity_factor=0.5, min_capacity=1, drop=drop)  # type: ignore[arg-type]
        routes = route(logits, routing, used=used)
        assert not routes.kept[~used].any()
        assert not routes.weights[~used].any()
        alone = route(logits[used], Routing(k=2))
        assert torch.equal(routes.counts, alone.counts)
        kept = routes.indices[routes.kept].bincount(minlength=4)
        assert torch.equal(kept, routes.counts.clamp(max=routes.limit)), "they take no place from others"
    first = route(logits, Routing(k=2, balance="first"), used=used).balance
    share = logits[used].argmax(1).bincount(minlength=4) / 20
    torch.testing.assert_close(first, 4 * (logits.softmax(1).mean(0) * share).sum())


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "least", "slots"),
    [(30, 3, 0.3, 0, 3), (7, 2, 1.0, 4, 4), (5, 8, 1.0, 0, 1), (25, 1, 0.6, 0, 16), (45, 3, 2.2, 0, 33)],
)
def test_capacity_is_rounded_up_and_at_least_the_least(
    tokens: int, experts: int, factor: float, least: int, slots: int
) -> None:
    """25 x 0.6 is more than 15 in fp32, where DeepSpeed computes it; 15 x 2.2 is more than 33 in fp64 alone."""
    assert max(int(torch.ceil(tokens / experts * torch.tensor(factor))), least) == slots
    assert capacity_of(tokens, experts, factor, least) == slots


def test_training_and_evaluation_have_capacities_of_their_own() -> None:
    routing = Routing(capacity_factor=1.0, eval_capacity_factor=2.0, min_capacity=0)
    gate = Gate(3, 4, routing)
    x = torch.randn(16, 3)
    assert (gate(x).limit, gate.eval()(x).limit) == (4, 8)
    assert Gate(3, 4)(x).limit is None


def test_the_balance_loss_is_one_when_even_and_as_many_as_experts_at_a_collapse() -> None:
    even = torch.full((8, 4), 0.25)
    assert balance_loss(even, torch.tensor([2, 2, 2, 2])) == 1
    collapsed = torch.tensor([[1.0, 0, 0, 0]]).expand(8, 4)
    assert balance_loss(collapsed, torch.tensor([8, 0, 0, 0])) == 4
    assert balance_loss(torch.zeros(0, 4), torch.zeros(4)) == 0


def test_the_losses_lower_the_logits_of_the_full_expert_and_of_all() -> None:
    logits = torch.tensor([[3.0, 0, 0]] * 6, requires_grad=True)
    routes = route(logits, Routing(k=1))
    (balance,) = torch.autograd.grad(routes.balance, logits, retain_graph=True)
    assert (balance[:, 0] > 0).all()
    assert (balance[:, 1:] < 0).all()
    assert routes.z.item() == pytest.approx(logits.detach().logsumexp(1).square().mean().item())
    (z,) = torch.autograd.grad(routes.z, logits)
    assert (z > 0).all()
    higher = route(logits + 5, Routing(k=1))
    torch.testing.assert_close(higher.balance, routes.balance)  # a softmax does not see it
    assert higher.z > routes.z


@pytest.mark.parametrize("k", [1, 2, 3])
def test_balance_counts_first_choices_or_all(k: int) -> None:
    logits = logits_of(50, 6)
    probs = logits.softmax(1)
    for balance, counted in (("first", 1), ("all", k)):
        routes = route(logits, Routing(k=k, balance=balance))  # type: ignore[arg-type]
        share = torch.zeros(50, 6).scatter_(1, probs.topk(counted)[1], 1).mean(0)
        assert routes.balance.item() == pytest.approx((probs.mean(0) * share).sum().item() * 6 / counted, rel=1e-6)


def test_gumbel_noise_draws_from_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 0.0, -1.0]).expand(20000, 3)
    share = torch.bincount((logits + gumbel(logits)).argmax(1)) / 20000
    torch.testing.assert_close(share, logits[0].softmax(0), atol=0.015, rtol=0)  # 4 standard deviations: 0.0137


def test_rsample_changes_who_is_chosen_and_not_the_weights() -> None:
    logits = logits_of(40, 4)
    torch.manual_seed(0)
    noisy = route(logits, Routing(noise="RSample"))
    calm = route(logits, Routing(noise="RSample"), training=False)
    assert not torch.equal(noisy.indices, calm.indices)
    assert torch.equal(noisy.weights, logits.softmax(1).gather(1, noisy.indices))
    assert torch.equal(calm.indices[:, 0], logits.argmax(1))


def test_a_sampled_second_choice_leaves_the_first() -> None:
    logits = logits_of(40, 4)
    torch.manual_seed(0)
    routes = route(logits, Routing(k=2, second_sampled=True))
    assert torch.equal(routes.indices[:, 0], logits.argmax(1))
    assert not torch.equal(routes.indices, logits.topk(2)[1])
    assert (routes.indices[:, 0] != routes.indices[:, 1]).all()


def test_deepspeeds_gates_of_two_and_more_take_no_rsample() -> None:
    logits = logits_of(40, 4)
    torch.manual_seed(0)
    one, two, three = (
        route(logits, Routing.deepspeed(k, noisy_gate_policy="RSample", drop_tokens=False)).indices for k in (1, 2, 3)
    )
    assert not torch.equal(one[:, 0], logits.argmax(1))
    assert torch.equal(two[:, 0], logits.argmax(1))
    assert torch.equal(three, logits.topk(3)[1])


def test_a_gate_begins_as_torchs_linear() -> None:
    torch.manual_seed(0)
    gate = Gate(8, 4)
    torch.manual_seed(0)
    assert torch.equal(gate.weight, nn.Linear(8, 4, bias=False).weight)


@pytest.mark.parametrize("noise", ["Jitter", "normal"])
def test_noise_is_for_training_alone(noise: str) -> None:
    torch.manual_seed(0)
    gate = Gate(8, 4, Routing(k=2, noise=noise))  # type: ignore[arg-type]
    x = torch.randn(64, 8)
    assert not torch.equal(gate(x).weights, gate(x).weights)
    gate.eval()
    assert torch.equal(gate(x).weights, gate(x).weights)
    plain = Gate(8, 4, Routing(k=2))
    plain.weight = gate.weight
    assert torch.equal(gate(x).weights, plain(x).weights)


def test_learned_noise_is_learned() -> None:
    torch.manual_seed(0)
    gate = Gate(8, 4, Routing(k=2, noise="normal"))
    gate(torch.randn(64, 8)).weights[:, 0].sum().backward()
    assert gate.noise is not None
    assert gate.noise.grad is not None
    assert gate.noise.grad.abs().sum() > 0


def test_experts_that_choose_are_all_full_and_take_those_that_score_highest() -> None:
    logits = logits_of(24, 4)
    routes = route(logits, Routing(k=2, by="experts", min_capacity=0))
    assert routes.rows.sizes == [12] * 4
    assert torch.equal(routes.kept, logits.softmax(1) >= logits.softmax(1).topk(12, 0)[0][-1])
    assert torch.equal(routes.weights, logits.softmax(1) * routes.kept)
    used = torch.arange(24) < 5  # fewer than the experts want
    assert route(logits, Routing(k=2, by="experts"), used=used).rows.sizes == [5] * 4


def test_ties_go_to_the_first() -> None:
    """A gate of zeros: what torch's topk would take is not said anywhere."""
    routes = route(torch.zeros(300, 64), Routing(k=4, capacity_factor=1.0, min_capacity=0, drop="probs"))
    assert torch.equal(routes.indices, torch.arange(4).expand(300, 4))
    assert torch.equal(routes.kept[:, 0].nonzero().flatten(), torch.arange(19))


def test_the_highest_are_found_alike_one_by_one_and_by_a_sort() -> None:
    x = torch.randint(4, (50, 20), generator=torch.Generator().manual_seed(0)).float()  # many ties
    x[0], x[1, :18], x[2, 3] = -torch.inf, -torch.inf, torch.nan
    by_sort = highest(x, FEW + 1)
    for k in range(1, FEW + 1):
        assert torch.equal(highest(x, k), by_sort[:, :k])
    assert x[0].isinf().all()


def test_a_sigmoid_with_groups_and_a_bias_is_deepseeks() -> None:
    logits, bias = logits_of(30, 12), 0.3 * torch.randn(12, generator=torch.Generator().manual_seed(1))
    routing = Routing(k=3, score="sigmoid", bias=True, groups=4, top_groups=2, scale=2.5)
    routes = route(logits, routing, bias=bias)
    for t in range(30):
        scores, by = logits[t].sigmoid(), logits[t].sigmoid() + bias
        groups = by.view(4, 3)
        best = groups.topk(2)[0].sum(1).topk(2)[1]
        allowed = [e for e in range(12) if e // 3 in best.tolist()]
        chosen = sorted(allowed, key=lambda e: -by[e].item())[:3]
        assert routes.indices[t].tolist() == chosen
        torch.testing.assert_close(routes.weights[t], 2.5 * scores[chosen] / scores[chosen].sum())


def test_the_bias_evens_out_what_a_skewed_gate_sends() -> None:
    torch.manual_seed(0)
    gate = Gate(8, 4, Routing(k=1, bias=True))
    x = torch.randn(512, 8) + 1
    before = gate(x).counts
    for _ in range(300):
        gate.rebalance(5e-3)
        after = gate(x).counts
    assert before.max() > 200
    assert after.max() < 160
    assert gate.weight.grad is None
    with torch.no_grad():
        gate(x)  # as a checkpoint's first run, which comes again
    gate.eval()(x)
    assert gate.load is not None
    assert gate.load.sum() == 512, "of the last turn alone"
    gate.rebalance()
    assert not gate.load.any()
    assert gate.bfloat16().bias.dtype == torch.float32  # type: ignore[union-attr]
    with torch.device("meta"):
        later = Gate(16, 4, Routing(bias=True, noise="normal"))
    later.to_empty(device="cpu").reset_parameters()
    assert later.bias is not None
    assert later.load is not None
    assert later.noise is not None
    assert not any(bool(x.any()) for x in (later.bias, later.load, later.noise)), "as of one that was built here"
    assert gate.weight.dtype == torch.bfloat16


def test_the_gate_computes_in_fp32_whatever_the_model_has() -> None:
    torch.manual_seed(0)
    gate = Gate(16, 4, Routing(k=2)).bfloat16()
    x = torch.randn(32, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gate(x)
    exact = route(x.float() @ gate.weight.float().T, Routing(k=2))
    assert inside.weights.dtype == torch.float32
    torch.testing.assert_close(inside.weights, exact.weights)
    inside.weights[:, 0].sum().backward()
    assert gate.weight.grad is not None


def test_the_smallest_sigmoids_add_up_to_1_too() -> None:
    weights = route(torch.full((1, 4), -30.0), Routing(k=2, score="sigmoid")).weights
    torch.testing.assert_close(weights, torch.full((1, 2), 0.5))


def test_another_routers_choice_becomes_routes() -> None:
    indices, weights = torch.tensor([[2, 0], [2, 3], [0, 2]]), torch.rand(3, 2)  # of 3 experts: 3 stands for none
    routes = Routes.given(indices, weights, 3)
    assert routes.rows.sizes == [2, 0, 3]
    assert routes.weights[1].tolist() == [weights[1, 0].item(), 0]


@pytest.mark.parametrize(
    ("routing", "says"),
    [
        ({"k": 5}, "a token cannot take that many of 4"),
        ({"k": 0}, "at least 1"),
        ({"groups": 3}, "4 experts do not make 3 equal groups"),
        ({"groups": 4}, "4 experts do not make 4 equal groups of two or more"),
        ({"k": 3, "groups": 2, "top_groups": 1}, "2 experts in 1 of 2 groups"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0"),
        ({"noise": "rsample"}, "noise is 'rsample': it must be one of 'RSample'"),
        ({"drop": "last"}, "drop is 'last'"),
        ({"by": "experts", "bias": True, "scale": 2.5}, "by='experts' goes without scale, bias: these"),
        ({"by": "experts", "noise": "RSample"}, "by='experts' goes without noise='RSample'"),
    ],
)
def test_what_cannot_be_routed_is_named(routing: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Gate(8, 4, Routing(**routing))  # type: ignore[arg-type]


def test_no_tokens_are_routed_too() -> None:
    for options in (
        {},
        {"by": "experts"},
        {"capacity_factor": 1.0, "drop": "random"},
        {"groups": 2, "score": "sigmoid"},
    ):
        gate = Gate(8, 4, Routing(k=2, **options))  # type: ignore[arg-type]
        routes = gate(torch.zeros(0, 8))
        assert routes.rows.sizes == [0] * 4
        loss = routes.balance + routes.z + routes.weights.sum()
        assert loss == 0
        loss.backward()
    assert isinstance(gate, nn.Module)


def test_under_expert_choice_a_later_token_decides_for_an_earlier_one() -> None:
    logits = torch.tensor([[3.0, 0], [2, 0], [1, 0], [0, 1], [0, 2], [0, 3]])
    later = logits.clone()
    later[5] = torch.tensor([9.0, 0])  # the last token wants expert 0 now
    before, after = (chosen_by_experts(x.softmax(1), x, 2, None).kept[:5] for x in (logits, later))
    assert before[1, 0]
    assert not after[1, 0]
    before, after = (route(x, Routing(k=1)).indices[:5] for x in (logits, later))
    assert torch.equal(before, after), "where tokens choose, each chooses by itself"
