"""Grades chapter 13's norm: one number of all ranks of a replica, in which what several of them hold counts once."""

import math
from collections.abc import Callable
from itertools import takewhile

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic

Held = list[tuple[Tensor | None, list[int]]]  # by one rank: gradients, and who else has each


def model_on(ranks: int) -> dict[str, list[list[int]]]:
    """Parameter -> who holds it: each list of ranks holds one and the same thing."""
    if ranks == 2:  # two stages
        return {"wte": [[0, 1]], "frozen": [[0, 1]], "block": [[0], [1]]}
    if ranks == 3:  # three stages, of which the second has nothing
        return {"head": [[0], [2]], "wte": [[0, 2]], "twin": [[0], [2]]}
    return {  # {"pp": 2, "tp": 2}
        "qkv": [[0], [1], [2], [3]],
        "ln": [[0, 1], [2, 3]],
        "wte": [[0, 2], [1, 3]],
        "bias": [[2, 3]],
        "scale": [[0, 1, 2, 3]],
    }


def gradients(rank: int, ranks: int, size: float, dtype: torch.dtype, bad: float) -> Held:
    """What a rank holds. "twin" has equal values on both its ranks, which are two parameters; "frozen" has none."""
    found: Held = []
    for number, (name, sets) in enumerate(model_on(ranks).items()):
        for part, holders in enumerate(sets):
            if rank in holders:
                seed = number if name == "twin" else 10 * number + part
                grad = size * torch.randn(2, 3 + part % 2, generator=torch.Generator().manual_seed(seed)).t()
                grad[0, 0] = bad if (bad and part == len(sets) - 1 and number == 0) else grad[0, 0]
                own_first = sorted(holders, key=lambda other: other != rank)
                found.append((None if name == "frozen" else grad.to(dtype), own_first))
    return found


@on_ranks(2, 3, 4)
def test_global_norm(answer: Answer, group: WatchedGroup) -> None:
    for size, dtype, bad in (
        (1.0, torch.float32, 0.0),
        (1e25, torch.float32, 0.0),
        (1e25, torch.bfloat16, 0.0),
        (900.0, torch.float16, 0.0),
        (3.0, torch.bfloat16, 0.0),
        (0.0, torch.float32, 0.0),
        (1.0, torch.float32, math.inf),
        (1.0, torch.float32, math.nan),
    ):
        case(f"{dtype}, elements of size {size:g}{f', one is {bad}' if bad else ''}; {model_on(group.size)}")
        every = [gradients(r, group.size, size, dtype, bad) for r in range(group.size)]
        mine, watched = every[group.rank], group.fresh()
        tensors = [grad for grad, _ in mine if grad is not None]
        with untouched(gradients=mine, tensors=tensors):
            found = answer.global_norm(watched, mine)
        require(isinstance(found, float), f"the result is {found!r}, expected a Python float")
        told = group.everyone(found)
        norm = norm_of(every, lambda rank, holders: rank == min(holders))
        if bad:
            what = f"one element on one rank is {bad}, and the norms are {told}: it must make them so, on all ranks"
            require(not any(math.isfinite(x) for x in told), what)
        else:
            judge_norm(found, norm, every, told)
        oracle = group.oracle()
        oracle.all_reduce(torch.zeros(1))
        if watched.ledger.calls() != {"all_reduce": 1}:
            same_traffic(watched, oracle, "global_norm")
        oracle.ledger.reset()
        oracle.all_reduce(torch.zeros(1, dtype=torch.float64))
        sent, most = (sum(g.ledger.sent_bytes().values()) for g in (watched, oracle))
        require(
            sent <= most, f"{sent} bytes for one norm, one number takes {most}: add up here, then reduce one number"
        )


def norm_of(every: list[Held], counts: Callable[[int, list[int]], bool]) -> float:
    kept = [
        g.double().square().sum() for r, held in enumerate(every) for g, who in held if g is not None and counts(r, who)
    ]
    return math.sqrt(sum(float(x) for x in kept))


def judge_norm(found: float, norm: float, every: list[Held], told: list[float]) -> None:
    if not math.isfinite(found):
        raise Wrong(f"the norm is {found}, expected {norm:g}: a square was too large for its dtype: square in fp64")
    once = [norm_of([held], lambda r, who, rank=rank: rank == min(who)) for rank, held in enumerate(every)]
    each = [norm_of([held], lambda r, who: True) for held in every]
    same = torch.tensor(told, dtype=torch.float64)
    local = any(torch.allclose(same, torch.tensor(own, dtype=torch.float64), rtol=1e-3) for own in (once, each))
    own_only = "each rank has the norm of its own gradients: the squares must be all-reduced"
    require(not (norm and local), own_only, f"  {told}")
    known = {
        "what several ranks hold is counted by each of them: it must count once": norm_of(every, lambda r, who: True),
        "what comes after a gradient of None is not counted": norm_of(
            [[*takewhile(lambda one: one[0] is not None, held)] for held in every], lambda r, who: r == min(who)
        ),
        "only rank 0's are counted": norm_of(every, lambda r, who: r == 0),
        "what several ranks hold is counted only if rank 0 has it": norm_of(
            every, lambda r, who: len(who) == 1 or (r == 0 and 0 in who)
        ),
        "what several ranks hold is not counted at all": norm_of(every, lambda r, who: len(who) == 1),
        "it is the sum of the ranks' norms: add up squares, then take one root": sum(once),
        "norms of single gradients were added: add up squares, then take one root": sum(
            float(g.double().norm())
            for r, held in enumerate(every)
            for g, who in held
            if g is not None and r == min(who)
        ),
        "the root is missing": norm**2,
    }
    value, wanted = torch.tensor(found, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)
    values = {k: torch.tensor(v, dtype=torch.float64) for k, v in known.items() if norm and not math.isclose(v, norm)}
    equal(value, wanted, "the norm", known=values, rtol=1e-5, atol=0)
    require(len(set(told)) == 1, f"the ranks must clip by the same norm, but have {told}")
