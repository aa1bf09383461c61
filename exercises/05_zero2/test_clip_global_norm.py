"""Grades chapter 05's clipping: one norm of all ranks' shards, the same factor on every rank."""

from collections.abc import Callable

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, close, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import (
    WatchedGroup,
    same_traffic,
)


@on_ranks(2, 3, 4)
def test_clip_global_norm(answer: Answer, group: WatchedGroup) -> None:
    for size, limit, dtype in (
        (1.0, 2.0, torch.float32),
        (1.0, 100.0, torch.float32),
        (1.0, 4.0, torch.float32),  # which no shard exceeds, but all together
        (1e20, 2.0, torch.float32),
        (0.0, 2.0, torch.float32),
        (900.0, 5.0, torch.float16),
        (3.0, 5.0, torch.bfloat16),
        (0.001, 1e-5, torch.float32),
        (9000.0, 1e-4, torch.float16),
    ):
        case(f"{dtype}, elements of size {size:g}, limit {limit:g}; one tensor under two names, rank 1 owns nothing")
        everyones = [shards_of(rank, size, dtype) for rank in range(group.size)]
        unique = [{id(t): t for t in shards.values()}.values() for shards in everyones]
        flats = [torch.cat([t.double().flatten() for t in mine]) if mine else torch.zeros(0) for mine in unique]
        norm = float(torch.cat(flats).norm())
        mine, watched = shards_of(group.rank, size, dtype), group.fresh()
        given = dict(mine)
        found = answer.clip_global_norm(watched, given, limit)
        require(list(given) == list(mine), "the dict of shards has other names than before")
        require(isinstance(found, float), f"the result is {found!r}, expected a Python float")
        told = group.everyone(found)
        own = [float(f.norm()) for f in flats]
        local = norm > 0 and torch.allclose(torch.tensor(told), torch.tensor(own), rtol=1e-3)
        require(
            not local, "each rank has the norm of its own shards: the sum of squares must be all-reduced", f"  {told}"
        )
        if found != norm:
            judge_norm(found, norm, everyones, own, limit)
        require(len(set(told)) == 1, f"the ranks must clip by the same norm, but have {told}")
        factor = min(1.0, limit / norm) if norm else 1.0
        for name, t in everyones[group.rank].items():
            names = sum(t is other for other in everyones[group.rank].values())
            rounded = torch.tensor(factor, dtype=dtype)
            known = {
                f"limit / norm, {factor:.3g}, was rounded to {dtype} first: multiply by a Python float": t * rounded,
                "it is not clipped": t,
                f"it is clipped {names} times: it is one tensor under {names} names": (t * factor**names).to(dtype),
                "it is multiplied by limit / norm although the norm is within the limit": (
                    t.double() * limit / max(norm, 1e-30)
                ).to(dtype),
            }
            if given[name] is not mine[name] and close(given[name], t * factor, rtol=1e-2):
                raise Wrong("the dict has new tensors: clip in place, whoever holds the old ones must see it")
            wanted = (t.double() * factor).to(dtype)
            rtol, atol = max(1e-5, torch.finfo(dtype).eps), torch.finfo(dtype).tiny * torch.finfo(dtype).eps
            equal(mine[name], wanted, f"the shard of {name}", known=known, rtol=rtol, atol=atol)
        oracle = group.oracle()
        oracle.all_reduce(torch.zeros(1))
        if watched.ledger.calls() != {"all_reduce": 1}:
            same_traffic(watched, oracle, "clip_global_norm")
        sent = sum(watched.ledger.sent_bytes().values())
        oracle.ledger.reset()
        oracle.all_reduce(torch.zeros(1, dtype=torch.float64))
        most = sum(oracle.ledger.sent_bytes().values())
        require(
            sent <= most, f"{sent} bytes for one norm, one number takes {most}: add up here, then reduce one number"
        )


def shards_of(rank: int, size: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a rank holds: odd sizes; rank 0 has one tensor under two names, rank 1 nothing."""
    if rank == 1:
        return {}
    generator = torch.Generator().manual_seed(rank)
    shards = {n: (size * torch.randn(3 + i + rank, generator=generator)).to(dtype) for i, n in enumerate(("a", "b"))}
    if rank == 0:
        shards["wte.weight"] = shards["head.weight"] = (size * torch.ones(7)).to(dtype)
        shards["x"] = shards["y"] = shards["a"]  # tied under any names, and next, equal but not tied
        shards["twin"] = shards["b"].clone()
    return shards


def judge_norm(found: float, norm: float, everyones: list[dict[str, Tensor]], own: list[float], limit: float) -> None:
    def of(once: Callable[[str, Tensor], object]) -> float:
        """The norm if `once` is what tells two tensors apart."""
        kept = [t for shards in everyones for t in {once(n, t): t for n, t in shards.items()}.values()]
        return float(torch.cat([t.double().flatten() for t in kept]).norm())

    known = {
        "the tied parameter is counted twice: it is one tensor under two names": of(lambda name, t: name),
        "tied parameters are known by a name: any two names can hold one tensor; compare with `is`, or by id": of(
            lambda name, t: name.replace("head", "wte")
        ),
        "two tensors of equal values count once: tied are those that are one tensor": of(
            lambda n, t: tuple(t.tolist())
        ),
        "it is the sum of the ranks' norms: add up squares, then take one root": sum(own),
        "it is the sum of the tensors' norms: add up squares, then take one root": sum(
            float(t.double().norm()) for shards in everyones for t in {id(t): t for t in shards.values()}.values()
        ),
        "it is the norm after clipping": min(norm, limit),
        "it is the largest of the ranks' norms: sum their squares": max(own),
        "it is the root of the mean of the ranks' squares: sum them": norm / len(everyones) ** 0.5,
        "the root is missing": norm**2,
        "it is inf: a square, or their sum, was too large: add up in fp64": float("inf"),
    }
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in known.items()}
    value, wanted = torch.tensor(found, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)
    equal(value, wanted, "the norm", known=tensors, rtol=1e-5, atol=0)
