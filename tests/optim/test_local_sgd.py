"""Local SGD and DiLoCo on ranks: one process's bits, the formula's bytes, a state that goes on, and what is refused."""

import copy
import io
from typing import Any

import local
import pytest
import torch
import worlds
from local import adamw, batch, everyone_has, flat, net, one_process, train
from torch import Tensor, nn, optim
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from refimpl.comm.collectives import chunk_sizes
from refimpl.comm.group import Group
from refimpl.optim.diloco import DiLoCo
from refimpl.optim.local_sgd import LocalSGD, Meeting
from refimpl.optim.weights import chunks

KINDS = {"local": LocalSGD, "diloco": DiLoCo}


def nesterov(params: list[nn.Parameter]) -> optim.Optimizer:
    """The outer optimizer, as the paper has it."""
    return optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def make(kind: str, model: nn.Module, every: int, **options: Any) -> Meeting:
    return KINDS[kind](model, every, **options)


def rounds_of(kind: str, rounds: int, every: int) -> Tensor:
    """A whole training on this rank, which begins with weights of its own."""
    group = Group.world()
    torch.manual_seed(50 + group.rank)
    model = local.Net()
    if group.rank == 0:
        model.load_state_dict(net().state_dict())
    outer = make(kind, model, every, message_size=20)  # several messages, and a tensor larger than one
    optimizer = adamw(list(model.parameters()))
    outer.group.ledger.reset()
    train(model, optimizer, group.rank, range(rounds * every), outer)
    sent = outer.group.ledger.sent_bytes("tag")
    sizes = [sum(sizes) for sizes in ([35], [5], [35], [33])]  # a.weight (tied), a.bias, b.weight, unused
    per_meeting = sum(sent_by(group, n) for n in sizes)
    assert sent.pop("weights" if kind == "local" else "outer gradients") == 4 * rounds * per_meeting
    assert sent == {"buffers": rounds * 4 * 3 * (group.size - 1) * (group.rank == 0)}
    assert (outer.since, outer.meetings) == (0, rounds)
    assert all(other.equal(flat(model)) for other in everyone_has(flat(model)))
    if isinstance(outer, DiLoCo):
        assert all(theta.grad is None for theta in outer.theta), "4 bytes a parameter, but while ranks meet"
    assert model.again.weight is model.a.weight
    assert all(other.equal(model.running) for other in everyone_has(model.running))
    return flat(model)


def sent_by(group: Group, n: int) -> int:
    """Elements that this rank sends in an all-reduce of n."""
    own = chunk_sizes(n, group.size)[group.rank]
    return n - own + own * (group.size - 1)


@pytest.mark.parametrize(("kind", "ranks"), [("local", 3), ("diloco", 2), ("diloco", 3), ("diloco", 4)])
def test_the_bits_are_those_of_one_process_and_the_bytes_the_formulas(kind: str, ranks: int) -> None:
    outer = nesterov if kind == "diloco" else None
    for found in worlds.run(rounds_of, kind, 3, 4, ranks=ranks):
        assert found.equal(one_process(ranks, 3, 4, outer=outer))


def on_one_rank() -> None:
    lookahead, alone = net(), net()
    train(lookahead, adamw(list(lookahead.parameters())), 0, range(6), DiLoCo(lookahead, 3))
    assert flat(lookahead).equal(one_process(1, 2, 3, outer=nesterov))
    train(alone, adamw(list(alone.parameters())), 0, range(6), LocalSGD(alone, 2))
    assert flat(alone).equal(one_process(1, 1, 6))


def test_a_process_alone_meets_itself() -> None:
    on_one_rank()


def settings() -> None:
    """What the two have in common, with each other, with DDP, with torch's averager."""
    group = Group.world()

    def sgd(params: Any) -> optim.Optimizer:
        return optim.SGD(params, lr=0.1)

    results = []
    for kind, options in (("local", {}), ("diloco", {"outer": lambda theta: optim.SGD(theta, lr=1.0)})):
        model = net()
        outer = make(kind, model, 1, **options)
        train(model, sgd(model.parameters()), group.rank, range(4), outer)
        results.append(flat(model))
    ddp = net()
    for step in range(4):  # gradients averaged at every step
        ddp.zero_grad()
        ddp(batch(group.rank, step)).backward()
        for p in ddp.parameters():
            if p.grad is not None:
                group.all_reduce(p.grad, "mean")
        sgd(ddp.parameters()).step()
    assert torch.allclose(results[0], flat(ddp), atol=1e-6)
    assert torch.allclose(results[0], results[1], atol=1e-6)

    peer, model = net(), net()
    averager, inner = PeriodicModelAverager(period=3, warmup_steps=2), adamw(list(peer.parameters()))
    for step in range(6):
        inner.zero_grad()
        peer(batch(group.rank, step)).backward()
        inner.step()
        averager.average_parameters(peer.parameters())  # of what has a gradient, after steps 2 and 5
    train(model, adamw(list(model.parameters())), group.rank, range(6), LocalSGD(model, 3))
    assert flat(model).equal(flat(peer))


def test_one_is_a_case_of_the_other_and_torchs_averager_has_the_same_bits() -> None:
    worlds.run(settings, ranks=2)


def resumed(kind: str, at: int, every: int, steps: int) -> bool:
    """Stop after `at` steps, go on in new objects: whether the bits are those of a run that never stopped."""
    rank = Group.world().rank

    def begin() -> tuple[nn.Module, optim.Optimizer, Meeting]:
        model = net()
        return model, adamw(list(model.parameters())), make(kind, model, every)

    whole, optimizer, outer = begin()
    train(whole, optimizer, rank, range(steps), outer)
    model, optimizer, outer = begin()
    train(model, optimizer, rank, range(at), outer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), outer.state_dict()], file)
    train(model, optimizer, rank, range(at, steps), outer)  # what was saved does not change with it
    file.seek(0)
    saved = torch.load(file)
    model, optimizer, _ = begin()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    outer = make(kind, model, every)  # overwrites the weights of this rank with rank 0's: the state has them
    outer.load_state_dict(saved[2])
    assert outer.since == at % every
    train(model, optimizer, rank, range(at, steps), outer)
    return flat(model).equal(flat(whole))


@pytest.mark.parametrize(("kind", "at", "ranks"), [("local", 5, 2), ("diloco", 5, 3), ("diloco", 8, 2)])
def test_a_state_goes_on_bit_for_bit_in_the_middle_of_a_round_and_after_one(kind: str, at: int, ranks: int) -> None:
    assert worlds.run(resumed, kind, at, 4, 13, ranks=ranks) == [True] * ranks


def low_precision() -> Tensor:
    group = Group.world()
    model = net(torch.bfloat16)
    outer = DiLoCo(model, 2)
    assert {theta.dtype for theta in outer.theta} == {torch.float32}
    train(model, adamw(list(model.parameters())), group.rank, range(6), outer)
    found = flat(model)
    half = net()
    outer = DiLoCo(half, 2, wire=torch.bfloat16)
    group = outer.group
    group.ledger.reset()
    train(half, adamw(list(half.parameters())), group.rank, range(2), outer)
    assert group.ledger.sent_bytes("tag")["outer gradients"] == 2 * sent_by(group, 35 + 5 + 35 + 33)
    return found


def test_low_precision_keeps_theta_in_fp32_and_may_travel() -> None:
    for found in worlds.run(low_precision, ranks=2):
        assert found.equal(one_process(2, 3, 2, outer=nesterov, dtype=torch.bfloat16))


def frozen_and_unfrozen() -> None:
    rank = Group.world().rank
    model = net()
    diloco, optimizer = DiLoCo(model, 2), adamw(list(model.parameters()))
    train(model, optimizer, rank, range(4), diloco)
    model.b.weight.requires_grad_(False)
    before = model.b.weight.detach().clone()
    train(model, optimizer, rank, range(4, 6), diloco)
    assert model.b.weight.equal(before)  # the outer momentum goes on, and does not move it
    model.fixed.requires_grad_(True)
    diloco.step()
    with pytest.raises(RuntimeError, match="fixed; build DiLoCo anew"):
        diloco.step()

    model = net()
    sgd, means = optim.SGD(model.parameters(), lr=0.1), LocalSGD(model, 3)
    train(model, sgd, rank, range(1), means)
    model.b.weight.requires_grad_(False)  # trained since the last meeting: differs between ranks
    model.fixed.requires_grad_(True)
    train(model, sgd, rank, range(1, 3), means)
    assert all(other.equal(flat(model)) for other in everyone_has(flat(model)))
    assert not model.fixed.equal(net().fixed)


def test_what_is_frozen_stays_and_what_is_unfrozen_is_not_forgotten() -> None:
    worlds.run(frozen_and_unfrozen, ranks=2)


def strided() -> None:
    """Transposed and expanded: each rank's own at first."""
    group, model = Group.world(), nn.Linear(2, 2)
    own = torch.full((3, 4), float(group.rank))
    model.register_buffer("turned", own.t())
    model.register_buffer("spread", own[:1].expand(3, 4))
    local = LocalSGD(model, 1)
    for value in (0.0, 1.0):
        assert all((buffer == value).all() for buffer in model.buffers())
        model.turned.fill_(1.0 + group.rank)
        model.spread.fill_(1.0 + group.rank)
        local.step()
    assert model.turned.stride() == (1, 4)


def test_buffers_are_rank_0s_however_they_lie_in_memory() -> None:
    worlds.run(strided, ranks=2)


def broken() -> None:
    rank = Group.world().rank
    for kind in KINDS:
        model = net()
        outer = make(kind, model, 1)
        if rank == 1:
            with torch.no_grad():
                model.a.bias[2] = float("nan")
        before = flat(model)
        with pytest.raises(FloatingPointError, match=r"rank 1: a.bias; nothing was averaged"):
            outer.step()
        assert flat(model).equal(before) == (rank != 1)  # NaN differs from itself
    state = make("diloco", model, 3).state_dict()
    with pytest.raises(ValueError, match="kind = DiLoCo, here LocalSGD"):
        make("local", model, 3).load_state_dict(state)
    model = net()
    outer = make("diloco", model, 3)
    outer.step()
    other = copy.copy(outer.state_dict())
    other["rank"] = (1 - rank, 2)
    with pytest.raises(
        ValueError, match=rf"saved 1 steps after a meeting by rank {1 - rank} of 2; here is rank {rank}"
    ):
        outer.load_state_dict(other)
    smaller = nn.Sequential(nn.Linear(2, 3))
    state = DiLoCo(smaller, 1).state_dict()
    with pytest.raises(ValueError, match=r"0.weight: saved with shape \(3, 2\), here \(2, 3\)"):
        DiLoCo(nn.Sequential(nn.Linear(3, 2)), 1).load_state_dict(state)


def test_errors_name_the_rank_the_parameter_the_remedy() -> None:
    worlds.run(broken, ranks=2)


def test_a_message_is_filled_up() -> None:
    tensors = [torch.zeros(n) for n in (3, 2, 6, 1, 4)] + [torch.zeros(1, dtype=torch.float64)]
    assert [[t.numel() for t in chunk] for chunk in chunks(tensors, 5)] == [[3, 2], [6], [1, 4], [1]]


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_every_is_a_number_of_steps(every: Any) -> None:
    with pytest.raises(ValueError, match=r"every = .* must be a whole number"):
        LocalSGD(nn.Linear(2, 2), every)


def test_something_must_be_trained() -> None:
    with pytest.raises(ValueError, match="no parameter to train"):
        DiLoCo(nn.Linear(2, 2).requires_grad_(False), 2)
    assert LocalSGD([nn.Parameter(torch.ones(2))], 2).weights.names == ["0"]
