"""Grades chapter 11: which heads a rank has of a fused matrix of queries, keys and values."""

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, close, equal, refused, require
from refimpl.grading.exchange import numbers
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import own_memory, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

# heads, heads of keys and values, width of a head, ranks
SHAPES = ((4, 4, 3, 2), (4, 2, 1, 2), (12, 12, 2, 4), (12, 3, 2, 3), (8, 8, 1, 1), (24, 6, 1, 6))


@on_ranks(1)
def test_cut_qkv(answer: Answer, group: WatchedGroup) -> None:
    for heads, kv_heads, d, ranks in SHAPES:
        case(f"{heads} heads, {kv_heads} of keys and values, {d} wide, {ranks} ranks")
        rows = (heads + 2 * kv_heads) * d
        for whole in (numbers(rows, 5, seed=8).requires_grad_(), torch.arange(rows).bfloat16()):
            for rank in range(ranks):
                with untouched(whole=whole):
                    found = answer.cut_qkv(whole, heads, kv_heads, rank, ranks)
                # Head by head: the queries of this rank's key/value heads, then these heads' keys, then their values.
                own = range(rank * kv_heads // ranks, (rank + 1) * kv_heads // ranks)
                queries = [i for i in range(heads) if i // (heads // kv_heads) in own]
                order = queries + [heads + j for j in own] + [heads + kv_heads + j for j in own]
                whole = whole.detach()
                expected = torch.cat([whole[i * d : (i + 1) * d] for i in order])
                in_turn = [i for i in range(heads) if i % ranks == rank] + order[len(queries) :]
                known = {
                    "query heads are dealt out in turn: they must stay with the key/value head that they read": (
                        torch.cat([whole[i * d : (i + 1) * d] for i in in_turn])
                    )
                }
                judge_cut(found, expected, whole, rank, ranks, known)
    case("3 heads of keys and values, 2 ranks: a ValueError is expected")
    try:
        with refused(ValueError, "3 heads of keys and values on 2 ranks"):
            answer.cut_qkv(numbers(12, 5, seed=9), 6, 3, 0, 2)
    except ValueError as error:
        require("3" in str(error) and "2" in str(error), f"the error does not name both numbers: {error}")
        return
    raise Wrong("3 heads of keys and values on 2 ranks are accepted: expected a ValueError with both numbers")


def judge_cut(found: object, expected: Tensor, whole: Tensor, rank: int, ranks: int, known: dict[str, Tensor]) -> None:
    if isinstance(found, Tensor) and ranks > 1 and len(whole) % ranks == 0:
        run = whole.chunk(ranks)[rank]
        require(
            not close(found, run) or close(run, expected),
            f"rank {rank} has one run of all rows: rank 0 then has queries only. Cut q, k and v each by itself",
        )
    equal(found, expected, f"the part of rank {rank}", known=known)
    assert isinstance(found, Tensor)
    require(found.data_ptr() != whole.data_ptr(), "the part is `whole` itself, or a view: copy it")
    require(not found.requires_grad, "the part holds the graph of `whole`, and so all of it: detach")
    own_memory(found, f"the part of rank {rank}")
