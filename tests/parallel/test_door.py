"""Layers that are given the same tensor share one f, also begun early; all ranks draw alike after an exception too."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from worlds import run

from refimpl.activation.checkpoint import Checkpoint
from refimpl.comm.group import Group
from refimpl.parallel.door import Door
from refimpl.parallel.draws import Draws
from refimpl.parallel.overlap import MARK
from refimpl.parallel.styles import Columns, Rows
from refimpl.parallel.swap import parallelize

B, T, HEADS, D = 2, 12, 12, 4  # 12 tokens and 12 heads go into 2, 3 and 4 ranks
C, HIDDEN = HEADS * D, 96
every_world = pytest.mark.parametrize("ranks", [2, 3, 4])
PLAN = {"q": Columns(units=HEADS), "k": Columns(units=HEADS), "v": Columns(units=HEADS), "o": Rows(units=HEADS)}
PLAN |= {"mlp.gate": Columns(), "mlp.up": Columns(), "mlp.down": Rows()}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(C, HIDDEN), nn.Linear(C, HIDDEN), nn.Linear(HIDDEN, C)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.silu(self.gate(x)) * self.up(x), 0.2, self.training)
        if self.fails:
            raise RuntimeError("between columns and rows")
        return self.down(hidden)


class Block(nn.Module):
    """Llama's: q, k and v apart, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.mlp, self.norm = Gated(), nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + F.dropout(self.mlp(self.norm(x)), 0.2, self.training)


def counted(sequence: bool) -> None:
    group = Group.world()
    torch.manual_seed(0)
    whole = Block().double().eval()
    split = parallelize(copy.deepcopy(whole), PLAN, group, sequence=sequence)
    x = torch.randn(B, T, C, dtype=torch.float64)
    mine = slice(T // group.size * group.rank, T // group.size * (group.rank + 1)) if sequence else slice(None)
    mine_x, whole_x = x[:, mine].clone().requires_grad_(), x.clone().requires_grad_()
    for model in (split, copy.deepcopy(split)):  # a twin has doors of its own
        mine_x.grad = None
        group.ledger.reset()
        y = model(mine_x)
        forward = group.ledger.calls()
        y.square().sum().backward()
        calls, n = group.ledger.calls(), x.numel() * 8
        if sequence:
            assert forward == {"all_gather": 2, "reduce_scatter": 2}
            assert calls == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 1}  # the bias of rows is whole
        else:
            assert forward == {"all_reduce": 2}
            assert calls == {"all_reduce": 4}
            assert group.ledger.sent_bytes() == {"all_reduce": 4 * 2 * n * (group.size - 1) // group.size}
    whole(whole_x).square().sum().backward()
    torch.testing.assert_close(y, whole(x)[:, mine], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine_x.grad, whole_x.grad[:, mine], rtol=1e-10, atol=1e-10)
    part = split.mlp.gate.split.part(whole.mlp.gate.weight.grad, group.rank, 0)
    torch.testing.assert_close(split.mlp.gate.weight.grad, part, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sequence", [False, True])
@every_world
def test_separate_q_k_v_and_a_gated_mlp_send_four_all_reduces(ranks: int, sequence: bool) -> None:
    run(counted, sequence, ranks=ranks)


class Twice(nn.Module):
    """Gives its columns x, x written to, and another tensor; in the middle of a call nothing is confused."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.weight.requires_grad_(False)  # or x could not be written to

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + 0
        hidden = self.a(x)
        with torch.no_grad():
            still = self.b(x)
        x.mul_(2)
        return self.out(hidden + still + self.b(x) + self.c(y))


def confusing() -> None:
    group = Group.world()
    torch.manual_seed(1)
    whole = Twice().double()
    split = parallelize(copy.deepcopy(whole), {"[abc]": Columns(), "out": Rows()}, group)
    x, y = torch.randn(2, 3, 8, dtype=torch.float64)
    for _ in range(2):
        grads = []
        for model in (whole, split):
            a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
            out = model(a, b)
            out.square().sum().backward()
            grads += [out.detach(), a.grad, b.grad]
        for expected, found in zip(grads[:3], grads[3:], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert split.a.enter.entered is None  # nothing is kept between calls


def test_a_tensor_that_was_written_to_is_another() -> None:
    run(confusing, ranks=2)


def failing() -> tuple[list[Tensor], list[Tensor]]:
    """(common numbers, own numbers): drawn after calls that failed inside the model, inside a part, or not at all."""
    group = Group.world()
    torch.manual_seed(4)
    model = nn.Sequential(Block(), Block())
    draws = Draws(4, group.rank)
    plan = {f"*.{name}": style for name, style in PLAN.items()}
    parallelize(model, plan, group, draws=draws)
    x, common, own = torch.randn(B, T, C), [], []
    torch.manual_seed(5)
    for call, fails in ((model, True), (model[0], True), (model[0].mlp, True), (model, False)):
        model[0].mlp.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="between columns and rows"):
                call(x)
        else:
            common.append(call(x))
        assert not draws.inside
        doors = [part.enter for part in model.modules() if isinstance(getattr(part, "enter", None), Door)]
        assert doors
        assert all(door.entered is None for door in doors), "what came in is let go of, also by a call that failed"
        common.append(torch.rand(3))
        with draws.apart():
            own.append(torch.rand(3))
    draws.enter()  # as an interrupt leaves it
    common.append(model(x))
    assert not draws.inside
    return common, own


def test_after_an_exception_all_ranks_draw_the_common_numbers() -> None:
    first, *others = run(failing, ranks=3)
    for common, own in others:
        assert all(map(torch.equal, common, first[0]))
        assert not any(map(torch.equal, own, first[1]))
    torch.manual_seed(5)  # what calls that failed drew of the common stream is what a plain model draws: nothing
    for drawn in first[0][:3]:
        assert torch.equal(drawn, torch.rand(3))


def overlapped() -> None:
    """Own tokens are multiplied between the begin and the end of the all-gather; bytes and numbers stay.

    The bound: a weight's gradient is a sum over B T tokens, added up in another order.
    """
    group = Group.world()
    torch.manual_seed(7)
    whole = Block().eval()
    x = torch.randn(B, T, C)
    mine, runs = slice(T // group.size * group.rank, T // group.size * (group.rank + 1)), []
    for overlap in (False, True):
        model = parallelize(copy.deepcopy(whole), PLAN, group, sequence=True, overlap=overlap)
        part = x[:, mine].clone().requires_grad_()
        group.ledger.reset()
        y = model(part)
        events = [(event.phase, event.op) for event in group.ledger.events if event.op in ("all_gather", MARK)]
        y.square().sum().backward()
        sent = group.ledger.sent_bytes()
        grads = [model.mlp.gate.weight.grad, model.q.weight.grad, model.mlp.up.bias.grad, model.norm.weight.grad]
        runs.append((sent, [y.detach(), part.grad, *grads]))
    began, ended = ("start", "all_gather"), ("end", "all_gather")
    marked = ("mark", MARK)  # q, k and v, then gate and up, share an all-gather: the first of them waits for it
    assert events == [began, marked, ended, marked, marked, began, marked, ended, marked]
    assert runs[0][0] == runs[1][0]
    eps = torch.finfo(torch.float32).eps
    for plain, found in zip(runs[0][1], runs[1][1], strict=True):
        assert float((found - plain).norm()) <= 2 * B * T * eps * float(plain.norm())
    with pytest.raises(ValueError, match="overlap=True: only with sequence=True is there an all-gather"):
        parallelize(copy.deepcopy(whole), PLAN, group, overlap=True)


@every_world
def test_a_column_layer_multiplies_its_own_tokens_while_the_others_come(ranks: int) -> None:
    run(overlapped, ranks=ranks)


def recomputed() -> None:
    """Activations computed again in backward: dropout between columns and rows must drop what forward dropped."""
    group, grads = Group.world(), []
    for how in ("kept", "tracked", "torch's", "torch's, in evaluation"):
        torch.manual_seed(6)
        block, draws = Block(), Draws(6, group.rank)
        x = torch.randn(B, T, C, requires_grad=True)
        parallelize(block, PLAN, group, draws=draws).train(how != "torch's, in evaluation")
        if how == "kept":
            y = block(x)
        elif how == "tracked":
            y = Checkpoint(trackers=(draws,))(block, x)
        else:
            y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        if how == "torch's":
            with pytest.raises(RuntimeError, match=r"dropout on parts again with other numbers .*trackers=\(draws,\)"):
                y.square().sum().backward()
            assert not draws.inside
        else:
            y.square().sum().backward()
            grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[1], grads[2])


def test_dropout_that_is_computed_again_is_the_same_or_refused() -> None:
    run(recomputed, ranks=2)
