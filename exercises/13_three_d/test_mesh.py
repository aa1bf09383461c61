"""Grades chapter 13's mesh: who is where and in whose group; and one loss of all tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic

IGNORED = -100
MESHES = (
    {"dp": 2, "pp": 2, "tp": 2},
    {"dp": 3, "tp": 2},
    {"pp": 2, "dp": 1, "cp": 3, "tp": 4},
    {"tp": 8},
    {"replicate": 2, "shard": 4},
    {"dp": 2, "dp_shard": 3},
    {"replicate": 2, "shard": 2, "pp": 1, "cp": 2, "ep": 1, "tp": 2},
)


@on_ranks(1)
def test_coordinates(answer: Answer, group: WatchedGroup) -> None:
    for axes in (*MESHES, {"dp": 8, "pp": 16, "cp": 16, "tp": 8}):
        case(f"axes {axes}")
        grid = torch.arange(math.prod(axes.values())).view(*axes.values())
        for rank in range(0, grid.numel(), max(1, grid.numel() // 50)):
            (place,) = (grid == rank).nonzero().tolist()
            with untouched(axes=axes):
                found = answer.coordinates(axes, rank)
            expected = dict(zip(axes, place, strict=True))
            evidence = [f"rank {rank}: expected {expected}", f"  found {found}"]
            require(isinstance(found, dict), f"the result is {found!r}, expected a dict", *evidence)
            if found == expected:
                continue
            first, left = {}, rank
            for name, size in axes.items():
                left, first[name] = divmod(left, size)
            require(found != first, "the first axis counts fastest here; it must be the last", *evidence)
            require(set(found) == set(axes), "there must be a coordinate for each axis, and no other", *evidence)
            beyond = [name for name in axes if not 0 <= found[name] < axes[name]]
            require(not beyond, f"a coordinate beyond its axis ({', '.join(beyond)}): 0 to size - 1", *evidence)
            raise Wrong("that is another rank's place", *evidence)


@on_ranks(1)
def test_mesh_groups(answer: Answer, group: WatchedGroup) -> None:
    for axes in MESHES:
        names = list(axes)
        for along in ([], [names[0]], [names[-1]], names, names[::2], names[:-3:-1]):
            case(f"axes {axes}, along {along}")
            right = groups_of(axes, along)
            known = {"across": right.t(), "runs": torch.arange(right.numel()).view(right.shape)}
            known["sorted"] = groups_of({n: axes[n] for n in sorted(axes)}, along)
            with untouched(axes=axes, along=along):
                found = answer.mesh_groups(axes, along)
            judge_groups(found, right.tolist(), {what: t.tolist() for what, t in known.items()}, right.numel())


def groups_of(axes: dict[str, int], along: list[str]) -> Tensor:
    """A group a row."""
    grid, names = torch.arange(math.prod(axes.values())).view(*axes.values()), list(axes)
    order = sorted(range(len(names)), key=lambda i: names[i] in along)
    return grid.permute(*order).reshape(-1, math.prod(axes[n] for n in along))


def judge_groups(found: Any, expected: list[list[int]], known: dict[str, list[list[int]]], ranks: int) -> None:
    evidence = [f"expected {str(expected)[:150]}", f"found    {str(found)[:150]}"]
    if found == expected:
        return
    lists = isinstance(found, list) and all(isinstance(g, list) for g in found)
    require(lists, "the result is no list of lists of ranks", *evidence)
    as_sets = sorted(sorted(g) for g in found)
    if as_sets == sorted(expected):
        raise Wrong(
            "the right groups in another order: ranks ascend in a group, and groups by their first rank", *evidence
        )
    require(
        as_sets != sorted(known["across"]),
        "ranks that share the coordinate are grouped; a group's ranks *differ* along the axes, and share the others",
        *evidence,
    )
    runs = "consecutive ranks are grouped, whatever the axis: only the last axes have consecutive ranks"
    require(as_sets != sorted(known["runs"]), runs, *evidence)
    require(sorted(r for g in found for r in g) == list(range(ranks)), "every rank is in exactly one group", *evidence)
    by_name = "axes are taken in the order of their names: it is the mapping's order that counts"
    require(as_sets != sorted(known["sorted"]), by_name, *evidence)
    raise Wrong("these are not the groups along those axes", *evidence)


@on_ranks(2, 3)
def test_token_weight(answer: Answer, group: WatchedGroup) -> None:
    everyone = {
        "one micro-batch each, unequally many tokens": [[[2]], [[3]], [[8]]],
        "several micro-batches; rank 1 has only ignored ones": [
            [[2, 1], [5], [1]],
            [[0], [0], [0]],
            [[1], [1, 1], [4]],
        ],
        "rank 0 has no micro-batch": [[], [[2], [7]], [[3]]],
        "no token counts anywhere": [[[0]], [[0, 0]], []],
        "fewer tokens than ranks": [[[1]], [[0]], []],
        "5001 tokens on rank 0": [[[5001]], [[1]], [[8]]],
    }
    for name, counts in everyone.items():
        case(name)
        counts = counts[: group.size]
        targets = [of_counts(rows) for rows in counts[group.rank]]
        watched = group.fresh()
        with untouched(targets=targets):
            found = answer.token_weight(watched, targets)
        is_number = isinstance(found, float | int) or (isinstance(found, Tensor) and found.numel() == 1)
        require(is_number, f"the result is {found!r}, expected a number")
        left = "a rank without micro-batches has left before the all-reduce, for which the others wait: all take part"
        require(targets or watched.ledger.events, left)
        judge_weight(float(found), counts, group.rank)
        calls = watched.ledger.calls().get("all_reduce", 0)
        once = f"{calls} all-reduces: count the tokens of all micro-batches first, then reduce one number"
        require(calls <= 1, once)
        oracle = group.oracle()
        oracle.all_reduce(torch.zeros(1))
        if watched.ledger.calls() != {"all_reduce": 1}:
            same_traffic(watched, oracle, "token_weight")
        oracle.ledger.reset()
        oracle.all_reduce(torch.zeros(1, dtype=torch.float64))
        sent, most = (sum(g.ledger.sent_bytes().values()) for g in (watched, oracle))
        require(sent <= most, f"{sent} bytes to count tokens, one number takes {most}: add up here first")


IGNORED_TOO = 3  # in each row, or more


def of_counts(rows: list[int]) -> Tensor:
    """A micro-batch's targets, a row for each number: so many that count, 0 among them, and some that do not."""
    width = max(rows) + IGNORED_TOO
    return torch.stack([torch.tensor([*range(n), *[IGNORED] * (width - n)]) for n in rows])


def judge_weight(found: float, counts: list[list[list[int]]], rank: int) -> None:
    """counts: rank -> micro-batch -> row -> tokens that count."""
    every = [of_counts(rows) for micro in counts for rows in micro]
    ranks, tokens = len(counts), sum(int((t != IGNORED).sum()) for t in every)
    if not tokens:
        require(math.isfinite(found), f"no token counts, and the weight is {found}: 0 times that spoils all weights")
        return
    own, micro = sum(map(sum, counts[rank])), max(1, len(counts[rank]))
    above = sum(int((t > 0).sum()) for t in every)
    rounded = torch.tensor(float(tokens)).bfloat16().item()
    known = {
        "this rank's own tokens divide: a token on a rank with few weighs more": ranks / max(1, own),
        "fewer tokens than ranks count as one a rank: ask only if there is any": ranks / max(ranks, tokens),
        "upside down: the tokens divide, and the ranks multiply": tokens / ranks,
        "gradients are averaged over ranks: without the factor N each token weighs 1/N of it": 1 / tokens,
        "ignored targets are counted too": ranks / sum(t.numel() for t in every),
        "multiplied by the number of this rank's micro-batches: their gradients add up": ranks * micro / tokens,
        "divided by the number of this rank's micro-batches too": ranks / tokens / micro,
        "target 0 is a token like any other: only IGNORED ones do not count": ranks / max(1, above),
        "the count was rounded: bf16 knows whole numbers up to 256 only": ranks / rounded,
    }
    value, wanted = torch.tensor(found, dtype=torch.float64), torch.tensor(ranks / tokens, dtype=torch.float64)
    values = {k: torch.tensor(v, dtype=torch.float64) for k, v in known.items() if not math.isclose(v, ranks / tokens)}
    equal(value, wanted, "the weight", known=values, rtol=1e-5, atol=0)
