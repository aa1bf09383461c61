"""DeepSpeed's DistributedAttention: its shapes and arguments, against attention in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from worlds import run

import refimpl.deepspeed as deepspeed
from refimpl.deepspeed.runtime.sequence_parallel import parallel_state_sp
from refimpl.deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from refimpl.deepspeed.sequence.layer import DistributedAttention, _SeqAllToAll

B, T, D = 2, 12, 4


class Attention(torch.nn.Module):
    """q, k, v [T, B, h, D] or [B, T, h, D] -> the same shape, or the heads flattened."""

    def __init__(self, batch: int, flat: bool) -> None:
        super().__init__()
        self.batch, self.flat = batch, flat

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        order = (0, 2, 1, 3) if self.batch == 0 else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if self.batch == 0 else (2, 0, 1, 3)
        q, k, v = (x.permute(order) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).permute(back)
        return out.flatten(2) if self.flat else out


def given(batch: int, heads: int, shared: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    first = (B, T) if batch == 0 else (T, B)
    return [torch.randn(*first, n, D, generator=generator) for n in (heads, shared, shared)]


def attended(batch: int, flat: bool, heads: int, shared: int) -> list[Tensor]:
    """Runs on every rank: output and gradients of its tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = (x.chunk(ranks, 1 - batch)[rank].clone().requires_grad_() for x in given(batch, heads, shared))
    group = dist.group.WORLD if flat else None  # which is all ranks too, as in torch
    attention = DistributedAttention(Attention(batch, flat), group, scatter_idx=2, gather_idx=0, num_kv_heads=shared)
    out = attention(q, k, v, batch, None, True)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


@pytest.mark.parametrize(
    ("ranks", "batch", "flat", "heads", "shared"),
    [(2, 1, False, 4, 4), (2, 0, True, 6, 2), (3, 1, True, 3, 3), (2, 0, False, 7, 7), (4, 1, True, 7, 7)],
)
def test_it_is_attention_over_all_tokens(ranks: int, batch: int, flat: bool, heads: int, shared: int) -> None:
    parts = run(attended, batch, flat, heads, shared, ranks=ranks)
    q, k, v = (x.requires_grad_() for x in given(batch, heads, shared))
    out = Attention(batch, flat)(q, k, v, True)
    out.square().sum().backward()
    for found, expected in zip(zip(*parts, strict=True), [out.detach(), q.grad, k.grad, v.grad], strict=True):
        torch.testing.assert_close(torch.cat(found, 1 - batch), expected, rtol=1e-5, atol=1e-5)


def groups_of_two_calls() -> int:
    attention = DistributedAttention(Attention(1, False), dist.new_group())
    made = [attention.group, attention.group]
    attention.spg = dist.group.WORLD
    return len({id(group) for group in [*made, attention.group]})


def test_its_group_is_made_once() -> None:
    """Each would take another of a GPU's streams."""
    assert run(groups_of_two_calls, ranks=2) == [2, 2]


def there_and_back(batch: int, heads: int) -> tuple[bool, list[int]]:
    x = given(batch, heads, 1)[0] + dist.get_rank()
    tokens = 1 - batch
    all_tokens = _SeqAllToAll.apply(dist.group.WORLD, x, 2, tokens, batch)
    back = _SeqAllToAll.apply(None, all_tokens, tokens, 2, batch)  # all ranks, as in torch
    return torch.equal(back, x), list(all_tokens.shape)


@pytest.mark.parametrize("batch", [0, 1])
def test_uneven_heads_there_and_back(batch: int) -> None:
    found = run(there_and_back, batch, 7, ranks=4)
    tokens = 4 * T
    first = [B, tokens] if batch == 0 else [tokens, B]
    assert found == [(True, [*first, heads, D]) for heads in (2, 2, 2, 1)]


def rotary() -> tuple[Tensor, Tensor]:
    """Of rank 0 of one: rotated inside, and rotated by hand with complex numbers."""
    q, k, v = given(1, 2, 2)
    angles = torch.arange(T)[:, None] * torch.tensor([1.0, 0.5])  # [T, D/2]
    table = torch.cat([angles, angles], -1)[None, :, None]  # [1, T, 1, D]
    out = DistributedAttention(Attention(1, False), None)(q, k, v, 1, (table.cos(), table.sin()), False)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None, None]
    by_hand = []
    for x in (q, k):
        y = torch.complex(*x.chunk(2, -1)) * turn
        by_hand.append(torch.cat([y.real, y.imag], -1))
    return out, Attention(1, False)(*by_hand, v, False)


def test_rotary_positions_are_those_of_the_whole_sequence() -> None:
    torch.testing.assert_close(*rotary())


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ValueError, match="scatter_idx is 1"):
        DistributedAttention(Attention(1, False), None, scatter_idx=1)
    with pytest.raises(ValueError, match="batch_dim_idx is 2"):
        DistributedAttention(Attention(1, False), None)(*given(1, 2, 2), 2)
    q, k, v = given(1, 2, 2)
    with pytest.raises(ValueError, match="num_kv_heads is 1, and the keys have 2 heads"):
        DistributedAttention(Attention(1, False), None, num_kv_heads=1)(q, k, v, 1)
    with pytest.raises(TypeError, match=r"batch_dim_idx is a tensor.*batch_dim_idx, None, mask"):
        DistributedAttention(Attention(1, False), None)(q, k, v, torch.ones(T, T))


def of_tokens(shared: int, stage: int) -> tuple[Tensor, float, Tensor]:
    """The losses of all tokens, their gradient's norm, and the weights after a step of SGD on a weighed mean."""
    torch.manual_seed(0)
    model, words, targets = torch.nn.Linear(D, 7), torch.randn(T, B, D), torch.randint(7, (T, B))
    mpu, rank = None, dist.get_rank()
    if shared > 1:
        parallel_state_sp.initialize_sequence_parallel(shared)
        mpu = parallel_state_sp
    config = {
        "train_micro_batch_size_per_gpu": B, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    group = mpu and parallel_state_sp.get_sequence_parallel_group()
    mine = [x.chunk(shared)[rank] for x in (words, targets)]
    losses = vocab_sequence_parallel_cross_entropy(engine(mine[0]), mine[1], group)
    engine.backward((losses * torch.linspace(0, 1, T)[:, None]).mean())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return losses.detach(), engine.get_global_grad_norm() or 0.0, model.weight.detach().clone()


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (3, 1), (2, 3)])
def test_the_losses_of_a_shared_sequence_train_as_those_of_one_process(ranks: int, stage: int) -> None:
    ((losses, norm, weight),) = run(of_tokens, 1, 0, ranks=1)
    for found, found_norm, found_weight in run(of_tokens, ranks, stage, ranks=ranks):
        torch.testing.assert_close(found, losses)
        assert found_norm == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(found_weight, weight)
