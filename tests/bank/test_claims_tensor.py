"""What cards on tensor and sequence parallelism claim and no other test shows."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import run

from refimpl.bank.card import Numeric
from refimpl.bank.load import load
from refimpl.bank.scope import value
from refimpl.comm.group import Group
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.conjugates import copy
from refimpl.parallel.split import Split
from refimpl.parallel.styles import Tokens, gpt_plan
from refimpl.parallel.swap import parallelize
from refimpl.parallel.tensor import ColumnParallelLinear, RowParallelLinear, local
from refimpl.plan.formulas import Layout, traffic
from refimpl.plan.transformer import flops_per_token, tensor_parallel_sent


def card(name: str) -> Numeric:
    found = load()[name]
    assert isinstance(found, Numeric)
    return found


def test_operations_a_byte_do_not_depend_on_the_batch() -> None:
    for w, t in ((4096, 2), (8192, 8)):
        config = GPTConfig(vocab=1, context=2048, width=w, layers=1, heads=w // 128)
        scores = 3 * 2 * 2 * w * config.context
        work = flops_per_token(config) - 3 * 2 * w - scores  # of the layer's matrices
        ratios = [work * b * config.context / t / tensor_parallel_sent(config, b, t) for b in (1, 2, 16)]
        assert ratios == pytest.approx([72 * w / (16 * (t - 1))] * 3)


def test_zero3_and_tensor_parallelism_send_the_same_at_the_cards_number_of_tokens() -> None:
    for w in (4096, 8192):
        tokens = 72 * w * w // (16 * w)
        config = GPTConfig(vocab=1, context=tokens, width=w, layers=1, heads=w // 128)
        for ranks in (2, 8):
            rows = traffic("zero3", ranks, 2, Layout(12 * w * w, 0, 0))
            weights = sum(row.bytes for row in rows if row.tag != "norm")
            assert weights == tensor_parallel_sent(config, 1, ranks)


def norms(summed: bool) -> tuple[list[float], bool]:
    """Losses of 20 steps under sequence parallelism, and whether all ranks' norms are still equal."""
    group, config = Group.world(), GPTConfig(vocab=256, context=16, width=32, layers=1, heads=2)
    plan = gpt_plan(config.heads, config.vocab)
    torch.manual_seed(0)
    kept = {name: style for name, style in plan.items() if summed or not isinstance(style, Tokens)}
    model = parallelize(GPT(config), kept, group, sequence=True)
    adamw, batches, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), Batches(corpus(), 16, 2), []
    for step in range(20):
        loss = model(*batches.batch(step, 0))
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    copies = group.all_gather_object([p.detach() for name, p in model.named_parameters() if "ln" in name])
    return losses, all(torch.equal(a, b) for a, b in zip(*copies, strict=True))


def test_norms_without_a_sum_drift_apart_and_the_loss_still_falls() -> None:
    right, equal = run(norms, True, ranks=2)[0]
    wrong, drifted = run(norms, False, ranks=2)[0]
    assert equal
    assert not drifted
    assert right[-1] < right[0] - 0.2
    assert wrong[-1] < wrong[0] - 0.2


def whole_gradients() -> None:
    """Norms and row biases have the unsplit model's gradients, without any sum of them."""
    group, config = Group.world(), GPTConfig(vocab=64, context=8, width=32, layers=1, heads=2)
    models = []
    for split in (False, True):
        torch.manual_seed(0)
        model = GPT(config).double()
        models.append(parallelize(model, gpt_plan(config.heads, config.vocab), group) if split else model)
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    group.ledger.reset()
    for model in models:
        model(tokens, tokens).backward()
    assert "tensor, whole parameters" not in group.ledger.calls("tag")
    for name, p in models[0].named_parameters():
        if "ln" in name or name.endswith(("out.bias", "down.bias")):
            grad = models[1].get_parameter(name).grad
            torch.testing.assert_close(grad, p.grad, rtol=1e-5, atol=1e-8)  # the loss is fp32
            assert all(torch.equal(grad, other) for other in group.all_gather_object(grad))


def test_gradients_of_whole_parameters_are_whole_without_sequence_parallelism() -> None:
    run(whole_gradients, ranks=2)


def test_a_run_of_a_fused_matrix_is_not_a_head() -> None:
    rows = torch.tensor([0] * 4 + [1] * 4 + [2] * 4)  # q, k, v: 4 heads of one row each
    assert set(rows.chunk(4)[0].tolist()) == {0}
    by_heads = Split((4, 4, 4), 4, 4)
    assert [by_heads.part(rows, rank, 0).tolist() for rank in range(4)] == [[0, 1, 2]] * 4


def three() -> tuple[int, int]:
    """All-reduces in backward, with an f for each of three layers and with one for all; the gradients are equal."""
    group = Group.world()
    torch.manual_seed(group.rank)
    weights = torch.randn(3, 4, 6)
    torch.manual_seed(9)
    x, counts, found = torch.randn(5, 6), [], []
    for each in (True, False):
        mine = x.clone().requires_grad_()
        entered = [copy(mine, group) for _ in weights] if each else [copy(mine, group)] * 3
        group.ledger.reset()
        torch.stack([z @ w.T for z, w in zip(entered, weights, strict=True)]).sum().backward()
        counts.append(group.ledger.calls()["all_reduce"])
        assert mine.grad is not None
        found.append(mine.grad)
    torch.testing.assert_close(found[0], found[1])
    return counts[0], counts[1]


def test_three_column_layers_with_an_f_each_send_three_times() -> None:
    assert run(three, ranks=2) == [(3, 1)] * 2


def recomputed(reentrant: bool) -> int:
    """All-reduces of a tensor-parallel block that is checkpointed, forward and backward."""
    group, config = Group.world(), GPTConfig(vocab=64, context=8, width=32, layers=1, heads=2)
    block = parallelize(GPT(config), gpt_plan(config.heads, config.vocab), group).blocks[0]
    group.ledger.reset()
    checkpoint(block, torch.randn(1, 8, 32, requires_grad=True), use_reentrant=reentrant).sum().backward()
    return group.ledger.calls()["all_reduce"]


def test_a_checkpointed_layer_sends_six_all_reduces_or_five_where_it_stops_early() -> None:
    assert run(recomputed, True, ranks=2) == [6, 6]
    assert run(recomputed, False, ranks=2) == [5, 5]


def test_equal_parts_stay_equal() -> None:
    def part() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(6, 4)

    up, down = [part(), part()], [part().weight.T.detach().clone().requires_grad_() for _ in range(2)]
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    params = [p for layer in up for p in layer.parameters()] + down
    adamw = torch.optim.AdamW(params, lr=0.1)
    for _ in range(5):
        y = sum((F.gelu(layer(x)) @ w.T for layer, w in zip(up, down, strict=True)), torch.zeros(5, 6))
        (y - x).square().mean().backward()
        adamw.step()
        adamw.zero_grad()
    assert torch.equal(up[0].weight, up[1].weight)
    assert not torch.equal(up[0].weight, part().weight)
    assert torch.linalg.matrix_rank(torch.cat([layer.weight.detach() for layer in up])) == 4  # of 6 that 8 rows allow


def test_padding_makes_equal_parts_and_changes_the_loss_unless_it_is_masked() -> None:
    question = card("tensor-vocabulary-padding")
    for seed in range(6):
        names = question.names(seed)
        V, t, m, padding = (names[key] for key in ("V", "t", "m", "answer"))
        assert (V + padding) % t == 0
        assert (V + padding) // t % m == 0
        assert 0 <= padding < t * m
    logits, target = torch.randn(3, 10), torch.tensor([1, 2, 3])
    padded = F.pad(logits, (0, 2))
    assert F.cross_entropy(padded, target) > F.cross_entropy(logits, target)
    assert torch.equal(
        F.cross_entropy(F.pad(logits, (0, 2), value=-torch.inf), target), F.cross_entropy(logits, target)
    )


def test_the_largest_noisy_logit_of_all_parts_is_a_draw_from_the_softmax() -> None:
    torch.manual_seed(0)
    logits, draws = torch.randn(12), 40_000
    noisy = logits - torch.empty(draws, 12).exponential_().log()
    parts = [part.max(1) for part in noisy.chunk(3, 1)]
    winner = torch.stack([values for values, _ in parts]).argmax(0)
    place = torch.stack([index for _, index in parts]).gather(0, winner[None]).squeeze(0) + 4 * winner
    assert torch.equal(place, noisy.argmax(1))
    shares = torch.bincount(place, minlength=12) / draws
    p = logits.softmax(0)
    assert ((shares - p).abs() < 5 * (p * (1 - p) / draws).sqrt()).all()


def partial_product() -> tuple[int, str]:
    """The dimension in which X A is split, the placement of X A B; and a bias added to that counts once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    x, a, b = torch.randn(3, 4), torch.randn(4, 6), torch.randn(6, 4)
    dx, da, db = (distribute_tensor(t, mesh, [how]) for t, how in ((x, Replicate()), (a, Shard(1)), (b, Shard(0))))
    z: Any = dx @ da @ db
    whole = z.redistribute(placements=[Replicate()])
    torch.testing.assert_close(whole.to_local(), x @ a @ b)
    bias: Any = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    torch.testing.assert_close((z + bias).full_tensor(), x @ a @ b + 1)
    column: Any = dx @ da
    return column.placements[0].dim, type(z.placements[0]).__name__


def test_a_row_cut_product_is_partial_until_it_is_reduced() -> None:
    (column, row), _ = run(partial_product, ranks=2)
    assert column == 1
    assert row == "Partial"


def test_a_whole_lora_matrix_before_a_split_one_gets_a_part_of_its_gradient() -> None:
    torch.manual_seed(0)
    x, A, B, slope = torch.randn(5, 6), torch.randn(2, 6), torch.randn(8, 2), torch.randn(5, 8)

    def gradient(rows: Tensor, grad: Tensor) -> Tensor:
        a = A.clone().requires_grad_()
        (x @ a.T @ rows.T).backward(grad)
        assert a.grad is not None
        return a.grad

    parts = [gradient(b, g) for b, g in zip(B.chunk(2), slope.chunk(2, 1), strict=True)]
    whole = gradient(B, slope)
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert not torch.allclose(parts[0], whole, atol=0.1)


class Latent(nn.Module):
    """DeepSeek-V2's attention without norms and rotations: keys and values of all heads come out of one latent."""

    WIDTH, QUERY, LATENT, ROPE, HEADS, NOPE, VALUE = 20, 12, 10, 2, 4, 3, 5

    def __init__(self) -> None:
        super().__init__()
        of = partial(nn.Linear, bias=False)
        self.q_a, self.kv_a = of(self.WIDTH, self.QUERY), of(self.WIDTH, self.LATENT + self.ROPE)
        self.q_b = of(self.QUERY, self.HEADS * (self.NOPE + self.ROPE))
        self.kv_b = of(self.LATENT, self.HEADS * (self.NOPE + self.VALUE))
        self.o = of(self.HEADS * self.VALUE, self.WIDTH)
        self.enter: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, WIDTH] -> [B, T, WIDTH]"""
        latent, rope = self.kv_a(x).split([self.LATENT, self.ROPE], -1)
        query, latent, rope = self.enter(self.q_a(x)), self.enter(latent), self.enter(rope)
        q = self.q_b(query).unflatten(-1, (-1, self.NOPE + self.ROPE)).transpose(1, 2)
        k, v = (
            self.kv_b(latent)
            .unflatten(-1, (-1, self.NOPE + self.VALUE))
            .transpose(1, 2)
            .split([self.NOPE, self.VALUE], -1)
        )
        k = torch.cat([k, rope.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], -1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def latent_attention() -> tuple[int, dict[str, int], bool]:
    """Runs on every rank: parameters it has, bytes sent in backward by one token, whether all is as in one process."""
    group, ranks = Group.world(), Group.world().size
    torch.manual_seed(0)
    whole, x = Latent(), torch.randn(2, 6, Latent.WIDTH)
    parts = deepcopy(whole)
    for name in ("q_b", "kv_b"):
        cut = ColumnParallelLinear(getattr(whole, name), group, units=Latent.HEADS, enter=local)
        setattr(parts, name, cut)
    parts.o = RowParallelLinear(whole.o, group, units=Latent.HEADS)  # type: ignore[assignment]
    parts.enter = lambda x: copy(x, group)
    truth, found = whole(x), parts(x)
    truth.square().mean().backward()
    group.ledger.reset()
    found.square().mean().backward()
    same = torch.allclose(found, truth, atol=1e-6)
    for name in ("q_a", "kv_a"):  # whole on every rank, and of every rank's heads
        same &= torch.allclose(getattr(parts, name).weight.grad, getattr(whole, name).weight.grad, atol=1e-6)
    sent = group.ledger.sent_bytes()["all_reduce"] * ranks // (2 * (ranks - 1) * 4 * x.shape[0] * x.shape[1])
    return sum(p.numel() for p in parts.parameters()), sent, same


@pytest.mark.parametrize("ranks", [2, 4])
def test_of_latent_attention_the_way_down_is_whole_on_every_rank(ranks: int) -> None:
    names = {"w": "WIDTH", "q": "QUERY", "c": "LATENT", "r": "ROPE", "H": "HEADS", "n": "NOPE", "v": "VALUE"}
    sizes = {name: getattr(Latent, size) for name, size in names.items()}
    held = value(card("parallel-latent-attention").answer, sizes | {"t": ranks})
    for parameters, sent, same in run(latent_attention, ranks=ranks):
        assert same
        assert parameters == held
        assert sent == Latent.QUERY + Latent.LATENT + Latent.ROPE  # of Latent.WIDTH in front of plain attention
