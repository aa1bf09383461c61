"""Grades chapter 04: one buffer and its shards, the state that a rank really keeps, weights equal to one process's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

from refimpl.grading.compare import Wrong, close, equal, first_divergence, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, same_traffic

FEATURES = 6
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
        self.inner = nn.Linear(FEATURES, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.spare = nn.Linear(5, 5)
        self.outer = nn.Linear(5, FEATURES, bias=False)
        self.outer.weight = nn.Parameter(self.outer.weight.detach().t().contiguous().t())  # not contiguous
        self.head = nn.Linear(5, FEATURES)
        self.head.weight = self.outer.weight

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        h = self.frozen(torch.tanh(self.inner(x)))
        h = self.spare(h) if spare else h
        return self.head(h) * self.outer(h)


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """This rank's loss; only even ranks use the spare layer."""
    x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x, spare=rank % 2 == 0).pow(2).mean()


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
    for ranks in (2, 3, 4, 7, numel, numel + 1):
        case(f"{numel} elements, {ranks} ranks")
        model, before = Net(seed=0), weights(Net(seed=0))
        identities = list(model.parameters())
        flat = answer.flatten(model, ranks)
        padded = -(-numel // ranks) * ranks
        expected = torch.cat([p.detach().reshape(-1) for p in trained] + [torch.zeros(padded - numel)])
        if isinstance(flat, Tensor) and flat.shape != expected.shape:
            judge_length(flat.numel(), numel, padded, ranks)
        equal(flat, expected, "the buffer")
        same = all(p is q for p, q in zip(identities, model.parameters(), strict=True))
        require(same, "the model has other parameters now: keep them, and change their .data")
        for name, p in model.named_parameters():
            equal(p.detach(), before[name], f"{name} after flatten")
            inside = p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            if p.requires_grad:
                require(inside, f"{name} is a copy: it must be a view of the buffer, so that both change together")
            else:
                require(not inside, f"{name} is frozen, and yet in the buffer")
        with torch.no_grad():
            flat.fill_(7.0)
        moved = all(bool((p == 7).all()) for p in model.parameters() if p.requires_grad)
        require(moved, "after flat.fill_(7) not every parameter is 7: some piece lies elsewhere")


def judge_length(found: int, numel: int, padded: int, ranks: int) -> None:
    evidence = f"{numel} elements in {ranks} shards: expected {padded} in all"
    frozen = sum(p.numel() for p in Net(seed=0).parameters()) - numel
    require(found % ranks == 0, f"the buffer has {found} elements, which {ranks} ranks cannot share evenly", evidence)
    if found != padded + ranks and found == -(-(numel + frozen) // ranks) * ranks:
        raise Wrong(f"the buffer has {found} elements: {frozen} of them are frozen parameters", evidence)
    raise Wrong(
        f"the buffer has {found} elements: more padding than needed" if found > padded else "too short", evidence
    )


@on_ranks(1)
def test_pieces_of(answer: Answer, group: WatchedGroup) -> None:
    for sizes in ([3, 4], [4, 4], [10], [1, 1, 1], [7, 1, 12, 5], [2, 0, 3], [1]):
        for ranks in (1, 2, 3, 4):
            shard = -(-sum(sizes) // ranks)
            for rank in range(ranks):
                case(f"sizes {sizes}, rank {rank} of {ranks}, shards of {shard}")
                judge_pieces(answer.pieces_of(sizes, ranks, rank), sizes, ranks, rank)


def labelled(sizes: list[int], shard: int, rank: int) -> list[tuple[int, int, int]]:
    """The pieces in a shard, by giving every single element of the buffer a label."""
    labels = [(number, i) for number, size in enumerate(sizes) for i in range(size)][rank * shard : (rank + 1) * shard]
    inside = {number: [i for n, i in labels if n == number] for number, _ in labels}
    return [(number, elements[0], elements[-1] + 1) for number, elements in inside.items()]


def judge_pieces(found: object, sizes: list[int], ranks: int, rank: int) -> None:
    shard = -(-sum(sizes) // ranks)
    first, expected = rank * shard, labelled(sizes, shard, rank)
    require(isinstance(found, list), f"the result is {found!r}, expected a list of (number, start, stop)")
    assert isinstance(found, list)
    found = [tuple(piece) for piece in found]
    if found == expected:
        return
    evidence = [f"  expected {expected}", f"  found    {found}"]
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    in_buffer = [(n, a + begins[n], b + begins[n]) for n, a, b in expected]
    require(
        found != in_buffer, "these are places in the buffer: count from the parameter's own first element", *evidence
    )
    in_shard = [(n, a + begins[n] - first, b + begins[n] - first) for n, a, b in expected]
    require(found != in_shard, "these are places in the shard: count from the parameter's own first element", *evidence)
    require(all(a < b for _, a, b in found), "a piece is empty: leave it out", *evidence)
    require(
        all(0 <= a < b <= sizes[n] for n, a, b in found),
        "a piece reaches beyond its parameter, e.g. into the padding",
        *evidence,
    )
    short = found == labelled(sizes, sum(sizes) // ranks, rank)
    require(not short, "the shards are rounded down: the last elements belong to nobody", *evidence)
    whole = all((a, b) == (0, sizes[n]) for n, a, b in found)
    require(
        not whole, "whole parameters are given out: a parameter that lies across shards has a piece in each", *evidence
    )
    raise Wrong("these are not the pieces of this shard", *evidence)


@on_ranks(2, 3, 4)
def test_ShardedOptimizer(answer: Answer, group: WatchedGroup) -> None:
    for name, make in MAKERS.items():
        case(f"3 steps of {name}; a layer unused on odd ranks, a frozen one, a tied weight")
        train(answer, group, make)
    case("ranks begin with different weights")
    model = Net(seed=group.rank)
    answer.ShardedOptimizer(model, group.fresh(), MAKERS["SGD"])
    for name, p in model.named_parameters():
        if p.requires_grad:
            known = {"it is still this rank's own: broadcast rank 0's": weights(Net(seed=group.rank))[name]}
            start = weights(Net(seed=0))[name]
            equal(p.detach(), start, f"{name} after ShardedOptimizer(...)", known=known if group.rank else None)


def train(answer: Answer, group: WatchedGroup, make: Make) -> None:
    """Three steps; weights, state, gradients and traffic after each."""
    watched, model = group.fresh(), Net(seed=0)
    sharded = answer.ShardedOptimizer(model, watched, make)
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    padded = -(-numel // group.size) * group.size
    history, truth = [weights(model)], one_process(group.size, 3, make)
    for step in range(3):
        watched.ledger.reset()
        loss(model, group.rank, step).backward()
        sharded.step()
        all_done(watched, "step")
        history.append(weights(model))
        judge_state(sharded, padded // group.size)
        judge_weights(history, truth, group, step, plain=make is MAKERS["SGD"])
        require(all(p.grad is None for p in trained), "gradients are kept after the step: set p.grad = None")
        oracle = group.oracle()
        oracle.reduce_scatter(torch.zeros(padded // group.size), torch.zeros(padded))
        oracle.all_gather(torch.zeros(padded), torch.zeros(padded // group.size))
        same_traffic(watched, oracle, f"step {step}")


def judge_state(sharded: object, shard: int) -> None:
    """The optimizer was given one shard and keeps state for that alone."""
    optimizer = getattr(sharded, "optimizer", None)
    require(isinstance(optimizer, optim.Optimizer), "self.optimizer is missing")
    assert isinstance(optimizer, optim.Optimizer)
    given = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
    kept = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.numel() > 1]
    evidence = f"a shard has {shard} elements; the optimizer was given {given} and keeps {sum(t.numel() for t in kept)}"
    require(given <= shard, "nothing is sharded: the optimizer owns more than this rank's shard", evidence)
    require(given == shard, "the optimizer owns less than this rank's shard", evidence)
    alive = sum(t.untyped_storage().nbytes() for t in kept)
    require(
        alive <= 4 * shard * len(kept),
        "the state is a view of larger memory: that memory stays alive as a whole",
        evidence,
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
        require(not close(now, stale), "the other ranks' shards are stale: all_gather them after the update", where)
        require(not close(now, before), "no weight has moved: does the optimizer update the buffer's own memory?")
        times = before + group.size * (expected - before)
        require(
            not (plain and close(now, times)),
            f"each update is exactly {group.size}x too large: the gradients are summed, not averaged",
        )
    first_divergence(found[: step + 2][1:], truth[1 : step + 2], "the value", ranks=group.size)


@on_ranks(2, 3, 4)
def test_step_traffic(answer: Answer, group: WatchedGroup) -> None:
    for strategy in ("ddp", "zero1"):
        for buckets, dtype in (
            ([12], torch.float32),
            ([5, 4], torch.float32),
            ([7, 1, 13], torch.bfloat16),
            ([1000, 1001], torch.bfloat16),
        ):
            case(f"{strategy}, buckets {buckets}, {dtype.itemsize} bytes an element, {group.size} ranks")
            oracle = group.oracle()
            for numel in buckets:
                padded = -(-numel // group.size) * group.size
                whole, mine = torch.zeros(padded, dtype=dtype), torch.zeros(padded // group.size, dtype=dtype)
                if strategy == "ddp":
                    oracle.all_reduce(whole)
                else:
                    oracle.reduce_scatter(mine, whole)
                    oracle.all_gather(whole, mine)
            calls, sent = oracle.ledger.calls(), oracle.ledger.sent_bytes()
            expected = {op: (calls[op], sent[op]) for op in calls}
            judge_traffic(answer.step_traffic(strategy, buckets, group.size, dtype.itemsize), expected, group.size)


def judge_traffic(found: object, expected: dict[str, tuple[int, int]], ranks: int) -> None:
    require(isinstance(found, dict), f"the result is {found!r}, expected a dict")
    assert isinstance(found, dict)
    evidence = [f"  expected {expected}", f"  found    {found}"]
    require(
        found.keys() == expected.keys(),
        f"it sends with {', '.join(expected)}; you have {', '.join(found) or 'nothing'}",
        *evidence,
    )
    for op, (calls, sent) in expected.items():
        mine_calls, mine = found[op]
        require(mine_calls == calls, f"{mine_calls} calls of {op}, the ledger counts {calls}: one a bucket", *evidence)
        if mine == sent:
            continue
        why = ""
        if mine * (ranks - 1) == sent * ranks:
            why = ": a rank does not send its own shard to itself"
        elif 2 * mine == sent:
            why = ": exactly half, and an all-reduce has two halves"
        elif mine < sent:
            why = ": is each bucket padded by itself?"
        raise Wrong(f"{mine} bytes by {op}, the ledger counts {sent}{why}", *evidence)
