"""Grades chapter 10's nearer neighbours: two levels, halving, and a second shard inside the node."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.grading.compare import Wrong, close, equal, refused, require
from refimpl.grading.exchange import numbers, total
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, in_place, own_memory
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic, starts

FP32, BF16 = torch.float32, torch.bfloat16


def of_ranks(ranks: list[int], group: WatchedGroup) -> WatchedGroup:
    handle = dist.new_group(ranks, use_local_synchronization=True) if len(ranks) > 1 else None
    return WatchedGroup(handle, group.control)


def nodes_of(group: WatchedGroup) -> Iterator[tuple[int, WatchedGroup, WatchedGroup]]:
    """Ranks of a node, this rank's node, and the ranks with its place in every node."""
    for per in (n for n in range(1, group.size + 1) if group.size % n == 0):
        node, place = divmod(group.rank, per)
        near = of_ranks(list(range(node * per, node * per + per)), group)
        yield per, near, of_ranks(list(range(place, group.size, per)), group)


def other(known: dict[str, Tensor], expected: Tensor) -> dict[str, Tensor]:
    """Of well-known mistakes those that can be told from what is right."""
    return {s: t for s, t in known.items() if t.shape != expected.shape or not close(t, expected)}


@on_ranks(2, 3, 4)
def test_two_level_all_reduce(answer: Answer, group: WatchedGroup) -> None:
    for per, near, far in nodes_of(group):
        for n, dtype in ((8, FP32), (13, BF16), (1, FP32), (7, torch.int64)):
            case(f"{group.size // per} nodes of {per} ranks, {n} elements of {dtype}")
            every = [numbers(n, seed=10 * n + r, dtype=dtype) for r in range(group.size)]
            x, inside, across = every[group.rank].clone(), near.fresh(), far.fresh()
            with in_place(x=x):
                answer.two_level_all_reduce(x, inside, across)
            expected = total(every)
            node = group.rank // per
            known = {
                "nothing has changed: x is to be changed in place": every[group.rank],
                "the sum of this node alone": total(every[node * per : node * per + per]),
                "the sum of the ranks with this place alone": total(every[group.rank % per :: per]),
            }
            judge_crossing(inside, across, n, dtype)
            equal(x, expected, "x", ranks=group.size, known=other(known, expected))


def judge_crossing(near: WatchedGroup, far: WatchedGroup, n: int, dtype: torch.dtype) -> None:
    inside, across, size = near.oracle(), far.oracle(), -(-n // near.size)
    mine, whole = torch.zeros(size, dtype=dtype), torch.zeros(size * near.size, dtype=dtype)
    across.all_reduce(mine.clone())
    found, right = (sum(g.ledger.sent_bytes().values()) for g in (far, across))
    if found > right and near.size > 1 and dtype != BF16:
        raise Wrong(
            f"{found:,} bytes leave this node from this rank, {right:,} are enough: its {near.size} ranks share "
            "the way out, so each brings a part of the node's sum"
        )
    same_traffic(far, across, "between nodes", itemsize=dtype.itemsize)
    if near.size == 1:
        return
    inside.reduce_scatter(mine, whole)
    inside.all_gather(whole, mine)
    said = "the whole vector is summed inside the node, so every rank has all of it to send across: reduce_scatter"
    require("all_reduce" not in near.ledger.calls(), said)
    found, right = (sum(g.ledger.sent_bytes().values()) for g in (near, inside))
    left_out = n % near.size and found < right
    require(not left_out, f"{n} elements are no multiple of {near.size}, and the last ones are left out: pad them")
    same_traffic(near, inside, "inside the node", itemsize=dtype.itemsize)


@on_ranks(1, 2, 4)
def test_halving_all_reduce(answer: Answer, group: WatchedGroup) -> None:
    for n, dtype in ((8, FP32), (13, BF16), (1, FP32), (6, torch.int64), (3, FP32)):
        case(f"{n} elements of {dtype}")
        every = [numbers(n, seed=20 * n + r, dtype=dtype) for r in range(group.size)]
        x = every[group.rank].clone()
        with in_place(x=x):
            answer.halving_all_reduce(x, group)
        judge_messages(group, n, dtype.itemsize)
        expected = total(every)
        equal(x, expected, "x", ranks=group.size, known=other({"nothing has changed": every[group.rank]}, expected))
        group.ledger.reset()
    if group.size == 1:
        judge_many(answer, group)
    case("the bits of all ranks")
    x = torch.randn(11, generator=torch.Generator().manual_seed(group.rank))
    answer.halving_all_reduce(x, group)
    bits = group.everyone(x)
    require(all(torch.equal(bits[0], t) for t in bits), "the ranks have different bits: a part is added up twice")


def judge_many(answer: Answer, group: WatchedGroup) -> None:
    """What each of 16 ranks would send, of which none is there."""
    for rank in range(16):
        case(f"the messages of rank {rank} of 16, which go nowhere")
        one = group.tally()
        one.rank, one.size, one.ranks = rank, 16, list(range(16))
        answer.halving_all_reduce(torch.zeros(37), one)
        judge_messages(one, 37, 4)


def judge_messages(group: WatchedGroup, n: int, itemsize: int) -> None:
    """Raise Wrong unless the messages are those of recursive halving and doubling; empty ones may be left out."""
    found = [(e.tag, e.sent_bytes) for e in starts(group.ledger, "send") if e.sent_bytes]
    size, out, back = n, list[tuple[str, int]](), list[tuple[str, int]]()
    for i in range(group.size.bit_length() - 1):
        first, bit = (size + 1) // 2, group.rank >> i & 1
        mine = size - first if bit else first
        out.append((f"to {group.rank ^ 1 << i}", (size - mine) * itemsize))
        back.insert(0, (f"to {group.rank ^ 1 << i}", mine * itemsize))
        size = mine
    expected = [message for message in out + back if message[1]]
    if found == expected:
        return
    whole = n > 1 and found and all(b == n * itemsize for _, b in found)
    require(not whole, "each message is the whole vector: halve it")
    require(not set(group.ledger.calls()) - {"send", "recv"}, "a collective is called: use send_recv alone")
    details = [f"  expected {expected}", f"  found    {found}"]
    if len(found) != len(expected):
        said = f"{len(found)} messages leave this rank, expected {len(expected)}: log2 N rounds there and back"
        raise Wrong(said, *details)
    if [to for to, _ in found] != [to for to, _ in expected]:
        ring = {to for to, _ in found} == {f"to {(group.rank + 1) % group.size}"}
        far = [to for to, _ in found[: len(out)]] == [to for to, _ in out[::-1]]
        said = "in round i it is rank XOR 2^i"
        if ring:
            said = "a ring: the partner is rank XOR 2^i"
        elif far:
            said = "the farthest rank comes first, with the most bytes"
        elif [to for to, _ in found] == 2 * [to for to, _ in out]:
            said = "the way back begins with the first round again, where it should begin with the last"
        raise Wrong(f"wrong partners: {said}", *details)
    wide = all(b in (right, right * 4 // itemsize) for (_, b), (_, right) in zip(found, expected, strict=True))
    require(not wide or itemsize == 4, "fp32 travels where x has another dtype: 4 bytes an element", *details)
    said = "the first half is the larger one; the rank whose bit i is 0 keeps it, and sends the second"
    raise Wrong(f"the halves are not as asked: {said}", *details)


@on_ranks(2, 3, 4)
def test_SecondShard(answer: Answer, group: WatchedGroup) -> None:
    for per, near, _ in nodes_of(group):
        for size, dtype in ((per * 2, FP32), (3, BF16), (1000, BF16)):
            case(f"{group.size // per} nodes of {per} ranks, shards of {size} elements, {dtype}")
            judge_second(answer, group.fresh(), near.fresh(), size, dtype)


def judge_second(answer: Answer, world: WatchedGroup, near: WatchedGroup, size: int, dtype: torch.dtype) -> None:
    old, new = ([numbers(size, seed=s + r, dtype=dtype) for r in range(world.size)] for s in (300, 400))
    versions = [(shards, torch.cat(shards)) for shards in (old, new)]
    part, nothing = versions[0][1].chunk(near.size)[0].clone(), torch.zeros_like(old[0])
    wrong = {
        "what the caller has written into forward's result: keep a copy of your part": torch.full_like(
            versions[0][1], 7
        )
    }
    kept = Kept(world)
    layer = answer.SecondShard(old[world.rank], world, near)
    refuse(layer, "before any forward")
    world.ledger.reset()
    near.ledger.reset()
    for number, (shards, whole) in enumerate(versions):
        if number:
            layer.step(shards[world.rank])
            kept.judge(0, "after step", "the second shard has the old weights: let it go")
            refuse(layer, "after step, when the second shard has the old weights")
        for micro in range(2):
            found = layer.forward()
            equal(found, whole, "forward", known=other({"the old weights": versions[0][1]}, whole))
            gathers(world, shards[0], "forward")
            require(not near.ledger.events, "forward gathers inside the node too: what it has from all ranks is enough")
            own_memory(found, "forward's result")
            found.fill_(7)  # the caller reuses the memory
            del found
            kept.judge(part.nbytes, "after forward", "a P-th of the layer, in memory of its own, no view of all of it")
            for again in range(micro + 1):
                back = another_backward(layer) if again else layer.backward()
                said = "backward gathers from all ranks: the node has a second copy, in P parts"
                require(not world.ledger.events, said)
                equal(back, whole, "backward", known=wrong)
                gathers(near, part, "backward")
                back.fill_(9)
                del back
    said = "the primary shard of the step before was written into: keep the new one, the old is the caller's"
    require(torch.equal(old[world.rank], versions[0][1].chunk(world.size)[world.rank]), said)
    another = answer.SecondShard(nothing, world.fresh(), near.fresh())
    another.forward()
    equal(layer.backward(), versions[1][1], "backward of one of two layers")


def gathers(group: WatchedGroup, part: Tensor, what: str) -> None:
    oracle = group.oracle()
    oracle.all_gather(part.new_empty(group.size * len(part)), part)
    same_traffic(group, oracle, what, itemsize=part.dtype.itemsize)
    group.ledger.reset()


def another_backward(layer: object) -> Tensor:
    """The second one behind a forward, as with two losses."""
    try:
        whole: Tensor = layer.backward()  # type: ignore[attr-defined]
    except RuntimeError as error:
        said = "backward works once: the weights are the same until `step`, so keep the second shard till then"
        raise Wrong(said, f"  {error}") from error
    return whole


def refuse(layer: object, when: str) -> None:
    """Raise Wrong unless backward does."""
    try:
        with refused(RuntimeError, f"backward {when}"):
            layer.backward()  # type: ignore[attr-defined]
    except RuntimeError:
        return
    raise Wrong(f"backward works {when}: it must raise a RuntimeError")
