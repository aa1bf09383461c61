"""Grades chapter 04: one buffer and its shards, the state that a rank really keeps, weights equal to one process's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from refimpl.grading.compare import Wrong, as_made, as_stored, by_users, close, equal, first_divergence, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory, storage_bytes
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, same_traffic

FEATURES = 6
F32 = torch.float32
Make = Callable[[list[nn.Parameter]], optim.Optimizer]
MAKERS: dict[str, Make] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01, eps=1e-2),
}


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, a transposed weight, and a layer that only some ranks use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)  # the first parameters are not trained
        self.inner = nn.Linear(FEATURES, 5)
        self.spare = nn.Linear(5, 5)
        self.outer = nn.Linear(5, FEATURES, bias=False)
        self.outer.weight = nn.Parameter(self.outer.weight.detach().t().contiguous().t())  # not contiguous
        self.head = nn.Linear(5, FEATURES)
        self.head.weight = self.outer.weight

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        h = self.frozen(torch.tanh(self.inner(x)))
        h = self.spare(h) if spare else h
        return self.head(h) * self.outer(h)


def mixed(dtype: torch.dtype, seed: int = 0) -> Net:
    """What is trained is of this dtype, what is frozen of another."""
    model = Net(seed).to(dtype)
    model.frozen.to(torch.float64)
    return model


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """This rank's loss; the spare layer is used by even ranks in one step and by odd ones in the next."""
    x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    return model(x.to(dtype), spare=(rank + step) % 2 == 0).pow(2).mean()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def one_process(ranks: int, steps: int, make: Make) -> list[dict[str, Tensor]]:
    """The weights at the start and after each step, the losses of all ranks taken by one process."""
    model = Net(seed=0)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    history = [weights(model)]
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss(model, rank, step) / ranks).backward()
        optimizer.step()
        history.append(weights(model))
    return history


@on_ranks(1)
def test_flatten(answer: Answer, group: WatchedGroup) -> None:
    trained = [p for p in Net(seed=0).parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    for ranks, dtype in ((2, F32), (3, F32), (4, F32), (7, F32), (numel, F32), (numel + 1, F32), (4, torch.bfloat16)):
        case(f"{numel} elements of {dtype}, {ranks} ranks")
        before, kept = weights(mixed(dtype)), Kept(group)
        model = mixed(dtype)
        identities = list(model.parameters())
        flat = answer.flatten(model, ranks)
        padded = -(-numel // ranks) * ranks
        values = [p.detach().reshape(-1).to(dtype) for p in trained]
        expected = torch.cat([*values, torch.zeros(padded - numel, dtype=dtype)])
        if isinstance(flat, Tensor) and flat.shape != expected.shape:
            where = flat.untyped_storage().data_ptr()
            moved = [n for n, p in model.named_parameters() if p.untyped_storage().data_ptr() == where]
            judge_length(flat.numel(), numel, padded, ranks, any(n.startswith("frozen") for n in moved))
        backwards = torch.cat([*reversed(values), torch.zeros(padded - numel, dtype=dtype)])
        known = {"the parameters lie in the reverse order: take that of model.parameters()": backwards}
        known |= as_stored([p.to(dtype) for p in trained], padded)
        equal(flat, expected, "the buffer", known=known)
        require(not flat.requires_grad, "the buffer requires a gradient: it is memory, and no parameter of its own")
        own_memory(flat, "the buffer")
        same = all(p is q for p, q in zip(identities, model.parameters(), strict=True))
        require(same, "the model has other parameters now: keep them, and change their .data")
        for name, p in model.named_parameters():
            equal(p.detach(), before[name], f"{name} after flatten")
            inside = p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            trains = not name.startswith("frozen")
            require(p.requires_grad == trains, f"{name} has requires_grad={p.requires_grad} now: leave it as it was")
            if trains:
                require(inside, f"{name} is a copy: it must be a view of the buffer, so that both change together")
            else:
                require(not inside, f"{name} is frozen, and yet in the buffer")
        del values, expected, backwards, known
        frozen = storage_bytes(p for p in model.parameters() if not p.requires_grad)
        advice = "the buffer and the frozen parameters alone may stay; where are the first values, or a copy?"
        kept.judge(padded * dtype.itemsize + frozen, "flatten", advice)
        with torch.no_grad():
            flat.fill_(7.0)
        moved = all(bool((p == 7).all()) for p in model.parameters() if p.requires_grad)
        require(moved, "after flat.fill_(7) not every parameter is 7: some piece lies elsewhere")


def judge_length(found: int, numel: int, padded: int, ranks: int, has_frozen: bool) -> None:
    evidence = f"{numel} elements in {ranks} shards: expected {padded} in all"
    frozen, tied = sum(p.numel() for p in Net(seed=0).parameters()) - numel, Net(seed=0).outer.weight.numel()
    require(found % ranks == 0, f"the buffer has {found} elements, which {ranks} ranks cannot share evenly", evidence)
    if has_frozen:
        raise Wrong(f"the buffer has {found} elements: {frozen} of them are frozen parameters", evidence)
    if found != padded + ranks and found == -(-(numel + tied) // ranks) * ranks:
        raise Wrong(
            f"the buffer has {found} elements: the tied weight, one tensor of two names, is in it twice", evidence
        )
    raise Wrong(
        f"the buffer has {found} elements: more padding than needed" if found > padded else "too short", evidence
    )


@on_ranks(2, 3, 4)
def test_ShardedOptimizer(answer: Answer, group: WatchedGroup) -> None:
    for name, make in MAKERS.items():
        case(f"3 steps of {name}; a layer used by even ranks, then by odd ones; a frozen one, a tied weight")
        train(answer, group, make, F32)
    case("3 steps of SGD in bf16")
    train(answer, group, MAKERS["SGD"], torch.bfloat16)
    few_gradients(answer, group)
    case("ranks begin with different weights; the frozen ones have a dtype of their own")
    model = mixed(F32, seed=group.rank)
    given: list[object] = []
    answer.ShardedOptimizer(model, group.fresh(), lambda params: given.append(params) or MAKERS["SGD"](params))
    require(isinstance(given[0], list), f"make_optimizer is given a {type(given[0]).__name__}, expected a list")
    for name, p in sorted(model.named_parameters(), key=lambda pair: not pair[1].requires_grad):
        advice = "broadcast rank 0's" if p.requires_grad else "frozen ones must be equal too: broadcast rank 0's"
        known = {f"it is still this rank's own: {advice}": weights(mixed(F32, seed=group.rank))[name]}
        start = weights(mixed(F32))[name]
        equal(p.detach(), start, f"{name} after ShardedOptimizer(...)", known=known if group.rank else None)


def train(answer: Answer, group: WatchedGroup, make: Make, dtype: torch.dtype) -> None:
    """Three steps; weights, state, gradients and traffic after each."""
    watched, truth = group.fresh(), one_process(group.size, 3, make)
    if dtype != F32:
        truth = [{n: t.to(dtype) for n, t in truth[0].items()}]  # its sums are rounded otherwise: not compared
    kept = Kept(watched)
    model = Net(seed=0).to(dtype)
    frozen = storage_bytes(p for p in model.parameters() if not p.requires_grad)
    sharded = answer.ShardedOptimizer(model, watched, make)
    as_made(getattr(sharded, "optimizer", None), make)
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    padded = -(-numel // group.size) * group.size
    history = [weights(model)] if dtype == F32 else []
    for step in range(3):
        watched.ledger.reset()
        loss(model, group.rank, step).backward()
        sharded.step()
        all_done(watched, "step")
        shard = padded // group.size
        state = judge_state(sharded, shard, dtype)
        judge_place(sharded, trained[0], shard, watched)
        judge_padding(sharded, shard, min(shard, max(0, shard * (group.rank + 1) - numel)))
        if dtype == F32:
            history.append(weights(model))
            judge_weights(history, truth, group, step, plain=make is MAKERS["SGD"])
        require(all(p.grad is None for p in trained), "gradients are kept after the step: set p.grad = None")
        own = [p.grad for g in sharded.optimizer.param_groups for p in g["params"] if p.grad is not None]
        require(not own, "the shard's own .grad is kept after the step: set it to None too")
        room = padded * dtype.itemsize + frozen + state + sum(storage_bytes(h.values()) for h in history)
        kept.judge(room, f"step {step}", "weights, and the state of a shard, may stay; is a buffer or a copy kept?")
        same_traffic(watched, wanted(group, padded, dtype), f"step {step}", itemsize=dtype.itemsize)
    if dtype != F32:
        moved = sum(float((p.detach().float() - truth[0][n].float()).abs().sum()) for n, p in model.named_parameters())
        require(moved > 0, f"no weight has moved in {dtype}")


def few_gradients(answer: Answer, group: WatchedGroup) -> None:
    """AdamW's means and weight decay move every weight of the shards, also where no gradient is."""
    model, plain = Net(seed=0), Net(seed=0)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer, history = MAKERS["AdamW"](trained), [weights(plain)]
    sharded = answer.ShardedOptimizer(model, group.fresh(), MAKERS["AdamW"])
    for step, (users, said) in enumerate(
        ((group.size, "a step whose gradients are not contiguous"), (1, "one in which rank 0 alone has any"),
         (0, "one in which nobody has any"))
    ):  # fmt: skip
        case(f"AdamW: {said}; a gradient that is None counts as zero; a schedule has set another lr")
        for one in (optimizer, sharded.optimizer):
            one.param_groups[0]["lr"] = 0.02 / (step + 1)
        for p in trained:
            p.grad = torch.zeros_like(p)
        for rank in range(users):
            (loss(plain, rank, step) / group.size).backward()
        optimizer.step()
        history.append(weights(plain))
        if group.rank < users:
            loss(model, group.rank, step).backward()
        for p in model.parameters():
            if p.grad is not None and p.dim() == 2:
                p.grad = p.grad.t().contiguous().t()
        sharded.step()
        known = {
            n: {"it is as before the step: the update must run all the same": history[step][n]} for n in history[0]
        }
        first_divergence([weights(model)], [history[-1]], "the value", ranks=group.size, known=known)


def wanted(group: WatchedGroup, padded: int, dtype: torch.dtype) -> WatchedGroup:
    """A group that has sent what a step sends."""
    oracle, mine = group.tally(), torch.zeros(padded // group.size, dtype=dtype)
    oracle.reduce_scatter(mine, mine.repeat(group.size))
    oracle.all_gather(mine.repeat(group.size), mine)
    return oracle


def judge_state(sharded: object, shard: int, dtype: torch.dtype) -> int:
    """The optimizer was given one shard and keeps state for that alone; returns the state's bytes."""
    optimizer = getattr(sharded, "optimizer", None)
    require(isinstance(optimizer, optim.Optimizer), "self.optimizer is missing")
    assert isinstance(optimizer, optim.Optimizer)
    given = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
    kept = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.numel() > 1]
    evidence = f"a shard has {shard} elements; the optimizer was given {given} and keeps {sum(t.numel() for t in kept)}"
    require(given <= shard, "nothing is sharded: the optimizer owns more than this rank's shard", evidence)
    require(given == shard, "the optimizer owns less than this rank's shard", evidence)
    alive = sum(t.untyped_storage().nbytes() for t in kept)
    room = dtype.itemsize * shard * len(kept)
    require(alive <= room, f"the state keeps {alive} bytes alive, its elements are {room}: is it a view?", evidence)
    return alive


def judge_place(sharded: Any, first: nn.Parameter, shard: int, group: WatchedGroup) -> None:
    """Each rank's shard lies where its elements of the buffer are; one in memory of its own is told by the weights.

    Every rank looks at all: rank 0 has the right place in the commonest mistake, and its weights another story.
    """
    mine = sharded.optimizer.param_groups[0]["params"][0]
    within = mine.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    for rank, at in enumerate(group.everyone(mine.storage_offset() if within else None)):
        own = "rank r has the r-th of N, S elements each"
        right = at in (None, rank * shard)
        require(right, f"rank {rank}'s shard begins at element {at} of the buffer, expected {rank * shard}: {own}")


def judge_padding(sharded: Any, shard: int, padding: int) -> None:
    """Behind the last weight the shard stays zero, whatever the optimizer does."""
    mine = torch.cat([p.detach().reshape(-1) for g in sharded.optimizer.param_groups for p in g["params"]])
    require(
        not mine[shard - padding :].any(),
        "the padding behind the last weight is not zero after a step: its gradient is memory that nobody wrote",
        f"  {mine[shard - padding :].tolist()[:6]}",
    )


def judge_weights(
    found: list[dict[str, Tensor]], truth: list[dict[str, Tensor]], group: WatchedGroup, step: int, plain: bool
) -> None:
    """The famous mistakes first, then the first parameter that differs."""

    def flat(state: dict[str, Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for n, t in state.items() if not n.startswith("frozen")])

    now, expected, before = flat(found[step + 1]), flat(truth[step + 1]), flat(truth[step])
    if not close(now, expected):
        shard = -(-len(expected) // group.size)
        mine = slice(group.rank * shard, (group.rank + 1) * shard)
        stale = before.clone()
        stale[mine] = expected[mine]
        where = f"step {step}: elements {mine.start} to {mine.stop} are new, all others are from the step before"
        require(
            not close(now, stale),
            "the other ranks' shards are stale: all_gather them after the update, into the buffer itself",
            where,
        )
        require(not close(now, before), "no weight has moved: does the optimizer update the buffer's own memory?")
        summed, twice = (before + factor * (expected - before) for factor in (group.size, 1 / group.size))
        large = f"each update is exactly {group.size}x too large: the gradients are summed, not averaged"
        require(not (plain and close(now, summed)), large)
        small = (
            f"each update is exactly 1/{group.size} of what it should be: the mean is divided by the ranks once more"
        )
        require(not (plain and close(now, twice)), small)
    even = (group.size + 1 - step % 2) // 2  # ranks that use the spare layer in this step
    lone = {}
    if plain:
        old, new = ({n: t for n, t in truth[at].items() if n.startswith("spare")} for at in (step, step + 1))
        updates = by_users({n: new[n] - old[n] for n in new}, group.size, {"spare": even})
        lone = {n: {said: old[n] + t for said, t in guesses.items()} for n, guesses in updates.items()}
    first_divergence(found[1 : step + 2], truth[1 : step + 2], "the value", ranks=group.size, known=lone)
