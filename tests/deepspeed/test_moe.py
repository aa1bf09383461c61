"""DeepSpeed's mixture of experts by its own names: the layer alone and on ranks, its gates, groups and state dicts."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import run

import refimpl.deepspeed as deepspeed
from refimpl.comm.axes import expert_groups
from refimpl.comm.group import Group
from refimpl.deepspeed.moe import sharded_moe, utils
from refimpl.deepspeed.moe.layer import MoE
from refimpl.deepspeed.moe.sharded_moe import TopKGate
from refimpl.deepspeed.utils import groups

WIDTH = 8


class Biased(nn.Linear):
    """As Megatron's layers: (output, a bias that is not added)."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight), self.bias


def made(seed: int = 0, **options: Any) -> MoE:
    """A layer whose experts all differ."""
    torch.manual_seed(seed)
    layer = MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)), **options)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return layer


def by_hand(layer: MoE, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Every token through its k experts, one after the other; nothing is dropped. (output, l_aux)"""
    flat = x.reshape(-1, WIDTH)
    probs = (flat @ layer.deepspeed_moe.gate.wg.weight.T).softmax(1)
    best, chosen = probs.topk(k, 1)
    weights = best if k == 1 else best / best.sum(1, keepdim=True)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    rows = [
        sum((w * experts[int(e)](token) for w, e in zip(ws, es, strict=True)), torch.zeros(WIDTH))
        for token, ws, es in zip(flat, weights, chosen, strict=True)
    ]
    counted = chosen[:, :1] if k == 2 else chosen
    share = F.one_hot(counted, probs.shape[1]).sum((0, 1)) / counted.numel()
    return torch.stack(rows).view_as(x), (probs.mean(0) * share).sum() * probs.shape[1]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drop", [True, False])
def test_alone(k: int, drop: bool) -> None:
    """With room enough, dropping or not: outputs, losses, counts and gradients of a loop over tokens."""
    layer = made(num_experts=5, k=k, capacity_factor=5.0, drop_tokens=drop, top2_2nd_expert_sampling=False)
    x = torch.randn(2, 7, WIDTH)
    output, l_aux, counts = layer(x)
    expected, loss = by_hand(layer, x, k)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(l_aux, loss)
    assert counts.shape == (5,)
    assert counts.sum() == 14 * k
    found = torch.autograd.grad(output.square().sum() + l_aux, list(layer.parameters()), materialize_grads=True)
    wanted = torch.autograd.grad(expected.square().sum() + loss, list(layer.parameters()), materialize_grads=True)
    torch.testing.assert_close(found, wanted)


def test_residual_and_a_bias_that_comes_with_it() -> None:
    torch.manual_seed(0)
    layer = MoE(WIDTH, Biased(WIDTH, WIDTH), num_experts=3, use_residual=True, min_capacity=20)
    x = torch.randn(4, WIDTH)
    output, _, _ = layer(x)
    share = layer.coefficient(x).softmax(-1)
    inner, beside = layer.deepspeed_moe(x), F.linear(x, layer.mlp.weight)
    torch.testing.assert_close(output, inner * share[:, :1] + beside * share[:, 1:])


def test_used_token_and_empty() -> None:
    layer = made(num_experts=4, k=2, min_capacity=20)
    x = torch.randn(2, 3, WIDTH)
    output, _, counts = layer(x, torch.tensor([[1, 1, 0], [0, 1, 1]]))
    assert counts.sum() == 8
    assert torch.equal(output[0, 2], torch.zeros(WIDTH))
    assert torch.equal(output[1, 0], torch.zeros(WIDTH))
    output, l_aux, counts = layer(torch.randn(0, WIDTH))
    assert output.shape == (0, WIDTH)
    assert l_aux == counts.sum() == 0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gates_dense_and_sparse(k: int) -> None:
    """Both forms say the same; attributes that change later count; drawn numbers only where a policy asks for them."""
    torch.manual_seed(k)
    gate = TopKGate(WIDTH, 4, k, 0.75, 2.0, 0, use_rts=False, top2_2nd_expert_sampling=False)
    x = torch.randn(16, WIDTH)
    l_aux, combine, mask, counts = gate(x)
    loss, capacity, experts, indices, slots, weights, came = gate(x, sparse_routes=True)
    assert (experts, int(capacity), counts.tolist(), l_aux) == (4, 3 * k, came.tolist(), loss)
    dense = torch.zeros_like(combine)
    for expert, slot, weight in zip(indices, slots, weights, strict=True):
        for t in (expert >= 0).nonzero()[:, 0]:
            dense[t, expert[t], slot[t]] += weight[t]
    assert torch.equal(dense, combine)
    assert torch.equal(mask, combine > 0)
    assert mask.sum((0, 2)).max() <= 3 * k
    assert (indices >= 0).sum() == mask.sum() < 16 * k
    places = sharded_moe._route_slots(indices, slots, 4, 3 * k)
    queues = sharded_moe._sparse_encode(x, places, 4, 3 * k)
    assert torch.equal(queues, torch.einsum("tec,tm->ecm", mask.float(), x))
    answers = sharded_moe._sparse_decode(queues.flatten(0, 1), places, weights, 16)
    torch.testing.assert_close(answers, torch.einsum("tec,ecm->tm", combine, queues))
    gate.eval()
    assert gate(x)[1].shape[2] == 8 * k
    gate.drop_tokens = False
    assert gate(x)[2].sum() == 16 * k
    assert sharded_moe.topkgating(torch.randn(16, 4), k, 0.25, 0, drop_tokens=False)[2].sum() == 16 * k


def beside_tensor_ranks() -> None:
    """Tensor ranks have the same tokens, and each sees a part of them at its experts, which are whole."""
    layers = [made(num_experts=4, k=2, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False) for _ in "ab"]
    for layer, tensor in zip(layers, (Group(None), Group.world()), strict=True):
        for _ in range(2):  # by set_deepspeed_parallelism, and by initialize
            layer.deepspeed_moe.use_ranks(Group(None), tensor, False)
        output, l_aux, _ = layer(torch.linspace(-1, 1, 7 * WIDTH).view(7, WIDTH).sin())
        (output.square().sum() + l_aux).backward()
    for (name, p), q in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_beside_tensor_ranks_are_those_of_one(ranks: int) -> None:
    run(beside_tensor_ranks, ranks=ranks)


def test_refused() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(AssertionError, match=r"experts \(3\) should be divisible .* \(2\)"):
        MoE(WIDTH, linear, num_experts=3, ep_size=2)
    with pytest.raises(AssertionError, match="noisy_gate_policy: loud"):
        MoE(WIDTH, linear, noisy_gate_policy="loud")
    with pytest.raises(ValueError, match="k=3"):
        MoE(WIDTH, linear, num_experts=2, k=3)
    with pytest.raises(RuntimeError, match=r"shared by 2 ranks.*set_deepspeed_parallelism"):
        MoE(WIDTH, linear, num_experts=2, ep_size=2)(torch.zeros(1, WIDTH))
    with pytest.raises(AssertionError, match="'ep_size_7' is not initialized"):
        groups._get_expert_parallel_group("ep_size_7")
    with pytest.raises(ValueError, match="Invalid drop_policy"):
        sharded_moe.topkgating(torch.zeros(2, 2), 1, 1.0, 0, drop_policy="last")  # type: ignore[arg-type]


def test_optimizer_groups() -> None:
    """Experts' parameters apart, by layer kind, with the options of the group they were in, in parts of a size."""
    model = nn.ModuleList([made(num_experts=2), nn.Linear(3, 3), made(num_experts=4)])
    for p in model[2].deepspeed_moe.experts.parameters():
        p.group_name = "ep_size_2"
    experts = [p for p in model.parameters() if utils.is_moe_param(p)]
    assert utils.has_moe_layers(model) == (True, 2)
    assert utils.has_moe_layers(model[1]) == (False, 0)
    given = {"params": list(model.parameters()), "name": "all", "lr": 0.5}
    found = utils.split_params_into_different_moe_groups_for_optimizer(given, max_group_size=130)
    assert [utils.is_moe_param_group(group) for group in found] == [False] + [True] * (len(found) - 1)
    assert {group["name"] for group in found[1:]} == {"ep_size_1", "ep_size_2"}
    assert all(group["lr"] == 0.5 for group in found)
    assert [p for group in found[1:] for p in group["params"]] == experts
    assert max(sum(p.numel() for p in group["params"]) for group in found[1:]) <= 130
    assert len(torch.optim.AdamW(found).param_groups) == len(found)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    shared, expert = utils.split_params_grads_into_shared_and_expert_params(model.parameters())
    assert (len(shared), len(expert)) == (len(list(model.parameters())) - len(experts), len(experts))
    assert len(utils.configure_moe_param_groups(list(model.parameters()))) == 3
    with pytest.raises(ValueError, match="Unknown param group type"):
        utils.split_params_into_different_moe_groups_for_optimizer(3)  # type: ignore[arg-type]


def on_ranks(ep: int, k: int, drop: bool, data_first: bool) -> tuple[list[int], list[int], list[str]]:
    """A layer on its ranks against the whole layer, each rank with other tokens and another number of them."""
    deepspeed.init_distributed()
    options = {"num_experts": 4, "k": k, "capacity_factor": 1.0, "min_capacity": 0, "drop_tokens": drop}
    options |= {"use_rts": False, "top2_2nd_expert_sampling": False}
    whole, layer = made(**options), made(ep_size=ep, **options)
    layer.set_deepspeed_parallelism(data_first)
    layer.load_state_dict(whole.state_dict())
    assert copy.deepcopy(layer).deepspeed_moe.held is layer.deepspeed_moe.held
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(3 + rank, WIDTH, requires_grad=True)
    output, l_aux, counts = layer(x)
    expected, loss, came = whole(x)
    assert torch.equal(l_aux, loss)
    assert torch.equal(counts, came)
    (mine,) = torch.autograd.grad(output.square().sum(), x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close((output, mine), (expected, wanted))
    if not drop:  # where only tokens travel, each rank's are multiplied apart, as here
        assert torch.equal(output, expected)
        assert torch.equal(mine, wanted)
    name = layer.expert_group_name
    shared, same = groups._get_expert_parallel_group(name), groups._get_expert_data_parallel_group(name)
    assert shared is not None
    theirs = dict(whole.named_parameters())
    for key, p in layer.named_parameters():
        if utils.is_moe_param(p):  # the sum over the tokens of the ranks that share the experts
            total = torch.zeros_like(p) if theirs[key].grad is None else theirs[key].grad.clone()
            everyone = torch.empty(dist.get_world_size(), *p.shape)
            dist.all_gather(list(everyone.unbind()), total) if ep == 4 else None
            total = everyone.sum(0) if ep == 4 else total
            if ep in (1, 4) and ep == dist.get_world_size():
                torch.testing.assert_close(p.grad, total)
    assert groups._get_expert_parallel_world_size(name) == ep
    assert groups._get_max_expert_size_name() == name
    assert same is not None
    return dist.get_process_group_ranks(shared), dist.get_process_group_ranks(same), list(layer.state_dict())


@pytest.mark.parametrize(("ep", "k", "drop", "data_first"), [(2, 1, True, False), (2, 3, False, True)])
def test_on_ranks(ep: int, k: int, drop: bool, data_first: bool) -> None:
    for rank, (shared, same, names) in enumerate(run(on_ranks, ep, k, drop, data_first, ranks=4)):
        block, line = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert (shared, same) == ((line, block) if data_first else (block, line))
        first = shared.index(rank) * 2
        experts = sorted({int(name.split(".")[3]) for name in names if "experts" in name})
        assert experts == [first, first + 1]


def state_dicts() -> list[str]:
    """DeepSpeed's names, counted from 0 on each rank, before and after the ranks are known; the whole layer's after."""
    whole, layer = made(num_experts=4), made(seed=1, num_experts=4, ep_size=2)
    world = Group.world()
    under = "deepspeed_moe.experts.deepspeed_experts."
    local = {}
    for key, value in whole.state_dict().items():
        number, _, rest = key.removeprefix(under).partition(".")
        if not key.startswith(under):
            local[key] = value
        elif int(number) // 2 == world.rank:
            local[f"{under}{int(number) % 2}.{rest}"] = value
    layer.load_state_dict(local)
    with pytest.raises(RuntimeError, match="which 2 of them are this rank's is not known yet"):
        layer.load_state_dict(whole.state_dict())
    layer.use_expert_ranks(lambda ep: expert_groups(world, ep))
    mine = {key: whole.state_dict()[key] for key in layer.state_dict()}
    for given in (None, local, mine, whole.state_dict()):
        if given is not None:
            with torch.no_grad():
                layer.deepspeed_moe.experts.deepspeed_experts[0][0].weight.zero_()
            layer.load_state_dict(given)
        assert all(torch.equal(value, mine[key]) for key, value in layer.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({key: value for key, value in mine.items() if "experts" not in key})
    return list(layer.state_dict())


def test_state_dicts() -> None:
    names = run(state_dicts, ranks=2)
    assert names[1][1] == "deepspeed_moe.experts.deepspeed_experts.2.0.weight"


class Net(nn.Module):
    """Layers of two sizes between dense ones, and their losses."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        options: dict[str, Any] = {"capacity_factor": 8.0, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.moe = made(num_experts=4, ep_size=ep, k=1, **options)
        self.more = made(seed=1, num_experts=2, ep_size=min(ep, 2), k=2, use_residual=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        y, first, _ = self.moe(self.first(x))
        y, second, _ = self.more(y)
        loss: Tensor = self.last(x + y).square().mean() + 0.01 * (first + second)
        return loss


def trained(ep: int, stage: int) -> dict[str, Tensor]:
    """Three steps; the whole model's weights, from all ranks."""
    torch.manual_seed(3)
    model = Net(1)
    state = model.state_dict()
    if ep > 1:
        rank = Group.world().rank % ep
        model = Net(ep)
        local = {}
        for key, value in state.items():
            parts = key.split(".")
            if "deepspeed_experts" in parts:
                each = (4 if parts[0] == "moe" else 2) // min(ep, 4 if parts[0] == "moe" else 2)
                place = rank % min(ep, 4 if parts[0] == "moe" else 2)
                if int(parts[4]) // each != place:
                    continue
                parts[4] = str(int(parts[4]) % each)
            local[".".join(parts)] = value
        model.load_state_dict(local)
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage}, "gradient_clipping": 0.5,
    }  # fmt: skip
    params = utils.configure_moe_param_groups(list(model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    torch.manual_seed(10 + Group.world().rank)
    for _ in range(3):
        loss = engine(torch.randn(2, 3, WIDTH))
        engine.backward(loss)
        engine.step()
    found: dict[str, Tensor] = {}
    for name, p in engine.module.named_parameters():
        value = deepspeed.utils.safe_get_full_fp32_param(p)
        assert value is not None
        found[name] = value.clone()
    everyone = Group.world().all_gather_object(found)
    return {name: value for part in everyone for name, value in part.items()}


def test_trained_in_every_stage() -> None:
    """ep 2 with stages 0 to 3 takes the steps of ep 1: an expert's gradient is averaged over all ranks' tokens."""
    one = run(trained, 1, 0, ranks=2)[0]
    for stage in range(4):
        two = run(trained, 2, stage, ranks=2)[0]
        assert two.keys() == one.keys()
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
