"""A plain GPT swapped by its plan, against the same GPT unsplit: forward, loss, gradients, traffic, state dict."""

import copy

import pytest
import torch
from autotp_same import BOUND, same_gradients
from torch import nn
from worlds import run

from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.auto import rehearsal
from refimpl.parallel.autotp import autotp
from refimpl.parallel.styles import AllTokens, Columns, Loss, Rows, Style, Tokens, Vocabulary, gpt_plan
from refimpl.parallel.swap import load_whole_state_dict, parallelize, whole_state_dict
from refimpl.plan.transformer import tensor_parallel_sent

B = 2
every_world = pytest.mark.parametrize("ranks", [2, 3, 4])


def shape(ranks: int) -> GPTConfig:
    """12 tokens; at 2 and 3 ranks heads, and at all the vocabulary, do not divide."""
    heads = 4 if ranks == 4 else 5
    return GPTConfig(vocab=37, context=12, width=8 * heads, layers=2, heads=heads)


def twins(dtype: torch.dtype, sequence: bool) -> tuple[Group, GPT, nn.Module, torch.Tensor, torch.Tensor]:
    group = Group.world()
    config = shape(group.size)
    torch.manual_seed(0)
    whole = GPT(config).to(dtype)
    for p in whole.parameters():  # so that no bias is zero
        nn.init.normal_(p, std=0.1)
    torch.manual_seed(group.rank)  # rank 0's weights are taken: another rank may have drawn others
    split = GPT(config).to(dtype)
    if group.rank == 0:
        split.load_state_dict(whole.state_dict())
    parallelize(split, gpt_plan(config.heads, config.vocab), group, sequence=sequence)
    torch.manual_seed(1)
    tokens, targets = torch.randint(config.vocab, (2, B, config.context))
    return group, whole, split, tokens, targets


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def compare(dtype: torch.dtype, sequence: bool) -> None:
    """The bound: 64 roundings, relative to the tensor's norm. A split dot product adds in another order, and only that:
    in fp64 the same number of its own, 2^29 times smaller, roundings is enough, which no wrong formula would meet."""
    group, whole, split, tokens, targets = twins(dtype, sequence)
    bound = 64 * torch.finfo(dtype).eps
    parts = split(tokens)
    logits = split.head.split.gather(parts.detach(), group, 2, "test")
    assert relative(logits, whole(tokens)) < bound
    loss, expected = split(tokens, targets), whole(tokens, targets)
    if dtype == torch.float64:  # the loss is computed in fp32, as the plain model's is
        loss, expected = parts.square().sum(), whole(tokens).square().sum()
        loss.backward()
    else:
        assert abs(loss.item() - expected.item()) < bound * expected.item()
        loss.backward()
    expected.backward()
    same_gradients(split, whole, group, bound)


@pytest.mark.parametrize("sequence", [False, True])
@every_world
def test_forward_loss_and_gradients_are_the_unsplit_models(ranks: int, sequence: bool) -> None:
    run(compare, torch.float32, sequence, ranks=ranks)
    run(compare, torch.float64, sequence, ranks=ranks)


def traffic(sequence: bool) -> None:
    group, _, split, tokens, _ = twins(torch.float32, sequence)
    block = split.blocks[0]
    length = tokens.shape[1] // group.size if sequence else tokens.shape[1]
    x = torch.randn(B, length, split.config.width, requires_grad=True)
    group.ledger.reset()
    y = block(x)
    forward = group.ledger.calls()
    y.backward(torch.randn_like(y))
    sent, calls = group.ledger.sent_bytes("tag"), group.ledger.calls("tag")
    assert sent["tensor"] == tensor_parallel_sent(split.config, B, group.size, itemsize=4)
    if sequence:
        assert forward == {"all_gather": 2, "reduce_scatter": 2}
        assert calls["tensor"] == 8
        whole = [p for name, p in block.named_parameters() if name.startswith("ln") or name in ROW_BIASES]
        assert calls["tensor, whole parameters"] == len(whole) == 6
        assert sum(p.numel() for p in whole) == 6 * split.config.width
    else:
        assert forward == {"all_reduce": 2}
        assert group.ledger.calls() == {"all_reduce": 4}


ROW_BIASES = ["attention.out.bias", "mlp.down.bias"]


@pytest.mark.parametrize("sequence", [False, True])
@every_world
def test_a_layer_sends_four_all_reduces_or_eight_halves(ranks: int, sequence: bool) -> None:
    run(traffic, sequence, ranks=ranks)


def states() -> None:
    _, whole, split, tokens, targets = twins(torch.float32, sequence=False)
    gathered = whole_state_dict(split)
    assert list(gathered) == list(whole.state_dict())
    assert all(torch.equal(x, gathered[name]) for name, x in whole.state_dict().items())
    assert split.head.weight is split.wte.weight
    assert sum(p.numel() for p in split.parameters()) < sum(p.numel() for p in whole.parameters())
    optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
    split(tokens, targets).backward()
    optimizer.step()
    other = GPT(split.config)
    other.load_state_dict(whole_state_dict(split))
    assert not torch.equal(other.wte.weight, whole.wte.weight)
    load_whole_state_dict(split, whole.state_dict())
    assert all(torch.equal(x, whole.state_dict()[name]) for name, x in whole_state_dict(split).items())


@every_world
def test_the_state_dict_is_gathered_and_taken_apart(ranks: int) -> None:
    run(states, ranks=ranks)


class OneKey(nn.Module):
    """Two heads of queries share one of keys, which two ranks then have whole."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(5, 6), nn.Linear(5, 3), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out((self.q(x).unflatten(-1, (-1, 3)) * self.k(x).unsqueeze(-2)).flatten(-2))
        return out


def copies_of_a_key() -> None:
    torch.manual_seed(0)
    whole = OneKey()
    plan = {"q": Columns(units=2), "k": Columns(units=1, copies=2), "out": Rows(units=2)}
    split = parallelize(copy.deepcopy(whole), plan, Group.world())
    x = torch.randn(4, 5)
    for model in (whole, split):
        model(x).square().sum().backward()
    for found, expected in zip(split.k.parameters(), whole.k.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_gradients_of_what_several_ranks_have_are_summed() -> None:
    run(copies_of_a_key)


def refusals() -> None:
    group = Group.world()

    def model() -> GPT:
        return GPT(GPTConfig(vocab=16, context=8, width=8, layers=1, heads=1))

    with pytest.raises(ValueError, match=r"blocks.0.attention.qkv: 1 units of 8 cannot be dealt to 2 ranks"):
        parallelize(model(), gpt_plan(1, 16), group)
    with pytest.raises(ValueError, match=r"no layer is called 'blocks.\*.mlp.gate'; the model's are wte, wpe"):
        parallelize(model(), {"blocks.*.mlp.gate": Columns()}, group)
    with pytest.raises(ValueError, match=r"blocks.0.mlp.up is matched twice"):
        parallelize(model(), {"blocks.*.mlp.up": Columns(), "blocks.0.mlp.u*": Rows()}, group)
    with pytest.raises(ValueError, match=r"wte.weight is shared with a layer that is split: give wte a place"):
        parallelize(model(), {"head": Columns(), "loss": Loss(16)}, group)
    (hooked := model()).blocks[0].mlp.up.register_full_backward_pre_hook(lambda module, grads: None)
    with pytest.raises(ValueError, match=r"blocks.0.mlp.up has hooks"):
        parallelize(hooked, {"blocks.*.mlp.up": Columns()}, group)
    split = parallelize(GPT(GPTConfig(16, 8, 8, 1, 2)), gpt_plan(2, 16), group, sequence=True)
    with pytest.raises(ValueError, match="dimension 1 has 7, which 2 ranks cannot share equally: pad it to 8"):
        split(torch.zeros(1, 7, dtype=torch.int64))


def test_what_a_plan_cannot_do_is_refused_by_name() -> None:
    run(refusals, ranks=2)


class Turned(nn.Module):
    """Attention as in torchtitan's Llama: it reads how many tokens there are, and turns queries by complex numbers."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4 * heads, 4 * heads) for _ in range(4))

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """x [B, T, C], turns [T, D/2] complex -> [B, T, C]."""
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, 4) for layer in (self.q, self.k, self.v))
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turns[:t, None]).flatten(-2)
            for y in (q, k)
        )
        y = nn.functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        mixed: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class Reader(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.wte, self.norm = nn.Embedding(24, 4 * heads), nn.LayerNorm(4 * heads)
        self.attention, self.head = Turned(heads), nn.Linear(4 * heads, 24)
        self.register_buffer("turns", torch.polar(torch.ones(12, 2), torch.arange(24.0).view(12, 2)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        normed = self.norm(x)
        named = x.shape[-1] == 12  # on three ranks, as transformers' decoder layers call theirs
        read = self.attention(x=normed, turns=self.turns) if named else self.attention(normed, self.turns)
        out: torch.Tensor = self.head(x + read)
        return out


def reads_its_length(found_out: bool) -> None:
    group = Group.world()
    torch.manual_seed(0)
    whole, (tokens,) = Reader(group.size), torch.randint(24, (1, 2, 12))
    plan: dict[str, Style] = {"wte": Vocabulary(), "norm": Tokens(), "head": Columns(gathered=True)}
    plan |= {"attention.[qkv]": Columns(units=group.size), "attention.out": Rows(units=group.size)}
    if found_out:  # its twin must be turned too
        split = copy.deepcopy(whole)
        assert "whole" not in autotp(split, group, tokens).kinds.values()
        assert rehearsal.make_twin(whole).turns.dtype == torch.complex128
    else:
        with pytest.raises(ValueError, match=r"attention.out: .* AllTokens\(\) in the plan"):
            parallelize(copy.deepcopy(whole), plan, group, sequence=True)(tokens)
        plan["attention"] = AllTokens()
        split = parallelize(copy.deepcopy(whole), plan, group, sequence=True)
    out, expected = split(tokens), whole(tokens)
    assert relative(out, expected) < BOUND
    out.square().sum().backward()
    expected.square().sum().backward()
    same_gradients(split, whole, group)


@every_world
@pytest.mark.parametrize("found_out", [False, True])
def test_a_model_that_reads_how_many_tokens_it_is_given(ranks: int, found_out: bool) -> None:
    run(reads_its_length, found_out, ranks=ranks)


class Strewn(nn.Module):
    """Another one on each rank: a weight that does not lie row by row, a buffer, and one whose rows share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.up.weight = nn.Parameter(torch.randn(8, 16).t())
        self.register_buffer("shift", torch.randn(8))
        self.register_buffer("rows", torch.randn(8).expand(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu()) + self.shift + self.rows[0]
        return out


def all_of_rank_0(found_out: bool) -> float:
    group = Group.world()
    torch.manual_seed(group.rank)
    model, x = Strewn(), torch.ones(2, 8)
    expected = model(x).detach()
    group.broadcast(expected, tag="test")
    if found_out:
        autotp(model, group, x)
    else:
        parallelize(model, {"up": Columns(), "down": Rows()}, group)
    return relative(model(x), expected)


@pytest.mark.parametrize("found_out", [False, True])
def test_every_weight_and_buffer_of_rank_0_is_taken(found_out: bool) -> None:
    assert max(run(all_of_rank_0, found_out, ranks=3)) < BOUND


def against_dtensor(rank_seed: int) -> None:
    """torch's own tensor parallelism of the same block, by `parallelize_module`, as the peer: outputs and gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    group = Group.world()
    torch.manual_seed(rank_seed)
    plain = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24))
    torch.manual_seed(rank_seed)
    peer = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24))
    mesh = init_device_mesh("cpu", (group.size,))
    parallelize_module(peer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ours = parallelize(plain, {"0": Columns(), "2": Rows()}, group)
    x, y = (torch.randn(5, 24).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    out, theirs = ours(x), peer(y)
    torch.testing.assert_close(out, theirs, rtol=1e-6, atol=1e-6)
    out.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    for name, p in peer.named_parameters():
        mine = ours.get_parameter(name)
        local = p.to_local()
        assert mine.shape == local.shape
        torch.testing.assert_close(mine.grad, p.grad.to_local(), rtol=1e-5, atol=1e-5)


def test_torchs_dtensor_computes_the_same_parts() -> None:
    run(against_dtensor, 3, ranks=2)
