"""Grades chapter 02's buckets: which parameters travel together, in the order of backward."""

import torch
from torch import nn

from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.zero.flat import cut_into_buckets


@on_ranks(1)
def test_assign_buckets(answer: Answer, group: WatchedGroup) -> None:
    for sizes, limit, frozen in (
        ([4, 3, 9, 2], 6, ()),
        ([4, 3, 9, 2], 7, ()),
        ([5, 5, 5, 5], 10, ()),
        ([1, 2, 3, 4, 5, 6], 7, (1, 5)),
        ([20, 1, 20], 5, ()),
        ([3], 100, ()),
        ([3, 2], 100, (0, 1)),
        ([1, 9, 3, 2], 6, (1,)),
    ):
        case(f"sizes {sizes}, limit {limit}" + (f", numbers {frozen} frozen" if frozen else ""))
        dtype = torch.bfloat16 if frozen else torch.float32
        shapes = [(1, n) if i % 2 else (n,) for i, n in enumerate(sizes)]
        params = [nn.Parameter(torch.zeros(s, dtype=dtype), i not in frozen) for i, s in enumerate(shapes)]
        number = {p: i for i, p in enumerate(params)}
        trained = {p: 0 for p in params if p.requires_grad}
        expected = [[number[p] for p in b] for b in cut_into_buckets(list(trained), trained, limit)]
        with untouched(params=params):
            buckets = answer.assign_buckets(params, limit)
        of_lists = isinstance(buckets, list) and all(isinstance(bucket, list) for bucket in buckets)
        of_params = of_lists and all(isinstance(p, nn.Parameter) for bucket in buckets for p in bucket)
        require(of_params, "the result is no list of lists of parameters")
        strange = "a bucket holds a parameter that is not among params: is a list kept from the call before?"
        require(all(p in number for bucket in buckets for p in bucket), strange)
        found = [[number[p] for p in bucket] for bucket in buckets]
        if found == expected:
            continue
        evidence = [f"  expected parameters {expected}", f"  found    parameters {found}"]
        flat = [i for bucket in found for i in bucket]
        require(not set(flat) & set(frozen), "a frozen parameter is in a bucket: it would wait for ever", *evidence)
        require(sorted(flat) == sorted(number[p] for p in trained), "some parameter is left out or twice", *evidence)
        require([] not in found, "there is an empty bucket", *evidence)
        in_order = flat == sorted(flat, reverse=True)
        each_is = all(part == sorted(part, reverse=True) for part in [*found, [bucket[0] for bucket in found]])
        again = "a parameter is put into a bucket before the last: that one waits for it, and is full too late"
        require(in_order or not each_is, again, *evidence)
        require(in_order, "wrong order: backward reaches the last parameter first", *evidence)
        for bucket in found:
            total = sum(sizes[i] for i in bucket)
            require(
                total <= limit or len(bucket) == 1, f"a bucket holds {total} elements, the limit is {limit}", *evidence
            )
        raise Wrong("a bucket is closed although the next parameter would fit", *evidence)
