"""Grades chapter 04's traffic: what a step sends with each collective, as the ledger counts it."""

import torch

from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup


@on_ranks(3, 2, 4)  # 3 first: with 2, "to itself" and "twice the bytes an element" are the same factor
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
            with untouched(buckets=buckets):
                found = answer.step_traffic(strategy, buckets, group.size, dtype.itemsize)
            judge_traffic(found, expected, buckets, group.size, dtype.itemsize)
        case(f"{strategy}, buckets [640, 1], 2 bytes an element, 64 ranks")
        once = 63 * (10 + 1) * 2  # to each other rank a chunk of either bucket
        expected = {"reduce_scatter": (2, once), "all_gather": (2, once)}
        expected = {"all_reduce": (2, 2 * once)} if strategy == "ddp" else expected
        judge_traffic(answer.step_traffic(strategy, [640, 1], 64, 2), expected, [640, 1], 64, 2)


def judge_traffic(
    found: object, expected: dict[str, tuple[int, int]], buckets: list[int], ranks: int, itemsize: int
) -> None:
    require(isinstance(found, dict), f"the result is {found!r}, expected a dict")
    assert isinstance(found, dict)
    evidence = [f"  expected {expected}", f"  found    {found}"]
    require(
        found.keys() == expected.keys(),
        f"it sends with {', '.join(expected)}; you have {', '.join(found) or 'nothing'}",
        *evidence,
    )
    for op, (calls, sent) in expected.items():
        pair = isinstance(found[op], tuple | list) and len(found[op]) == 2
        require(pair, f"{op} has {found[op]!r}, expected (calls, bytes)", *evidence)
        mine_calls, mine = found[op]
        require(isinstance(mine, int), f"{mine!r} bytes by {op}: bytes are whole numbers, divide by //", *evidence)
        require(mine_calls == calls, f"{mine_calls} calls of {op}, the ledger counts {calls}: one a bucket", *evidence)
        if mine == sent:
            continue
        why, cut = "", sum(n // ranks for n in buckets) * (ranks - 1) * itemsize
        if itemsize < 4 and mine * itemsize == 4 * sent:
            why = f": an element counts as 4 bytes, and it has {itemsize}"
        elif mine * (ranks - 1) == sent * ranks:
            why = ": a rank does not send its own shard to itself"
        elif mine == (2 * cut if op == "all_reduce" else cut):
            why = ": each bucket is rounded down, and what is left over must travel too"
        elif 2 * mine == sent:
            why = ": exactly half, and an all-reduce has two halves"
        elif mine < sent:
            why = ": is each bucket padded by itself?"
        raise Wrong(f"{mine} bytes by {op}, the ledger counts {sent}{why}", *evidence)
