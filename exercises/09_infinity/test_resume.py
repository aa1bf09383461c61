"""Grades what chapter 09 computes: how often to save, which samples come next, and who reads what."""

import json
from itertools import chain, islice
from typing import Any

import torch

from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

DAY = 86400.0


def lost(t: float, write: float, mtbf: float) -> float:
    """The share of time that saves `t` seconds apart, and failures, cost."""
    return write / t + t / (2 * mtbf)


@on_ranks(1)
def test_checkpoint_steps(answer: Answer, group: WatchedGroup) -> None:
    for step, write, node, nodes in (
        (10.0, 60.0, 32 * 3000.0, 32),
        (1000.0, 1.0, 3 * DAY, 100),  # the best t is shorter than a step
        (1.0, 30.0, 5 * 365 * DAY, 2048),
        (7.0, 12.5, 900 * DAY, 1),
        (30.0, 60.0, 365 * DAY, 20000),
        (10.0, 1.05, 100.0, 1),  # 1.449 steps: nearer to 1, and 2 lose less
        (10.0, 4.0, 10.0, 1),
        (1.0, 1.0, 1.0, 1),  # 1 and 2 lose the same
        (1e-5, 300.0, 30 * 365 * DAY, 1),
        (0.25, 0.001, 100 * DAY, 7),
        (0.1, 1.0, 10.0, 4),  # a failure every 2.5 s
    ):
        case(f"a step of {step:g} s, a save of {write:g} s, a node fails every {node:,.0f} s, {nodes} nodes")
        found = answer.checkpoint_steps(step, write, node, nodes)
        judge_steps(found, step, write, node, nodes)


def judge_steps(found: Any, step: float, write: float, node: float, nodes: int) -> None:
    require(isinstance(found, int), f"the result is {found!r}, expected a whole number of steps")
    require(found >= 1, f"{found} steps between two checkpoints: at least 1")
    mtbf = node / nodes
    near = round((2 * write * mtbf) ** 0.5 / step)
    best = min(range(max(1, near - 2), near + 3), key=lambda k: lost(k * step, write, mtbf))
    least = lost(best * step, write, mtbf)
    mine = lost(found * step, write, mtbf)
    if mine <= least * (1 + 1e-9):
        equal = f"{found:,} steps lose as much as {best:,}: of two that are equally good the smaller one is asked"
        require(found <= best or found > 1000, equal)  # where a step more is less than the last bit
        return
    known = {
        "the failures of one node were taken for those of the job: any node ends it": (
            (2 * write * node) ** 0.5 / step if nodes > 1 else 0
        ),
        "the formula's 2 is missing: half an interval is lost a failure, not a whole one": (write * mtbf) ** 0.5 / step,
        "a job on more nodes fails sooner: divide by them": (
            (2 * write * node * nodes) ** 0.5 / step if nodes > 1 else 0
        ),
        "failures come in no whole seconds: divide by /, not //": (mtbf < 3) * (2 * write * int(mtbf)) ** 0.5 / step,
        "that is seconds, not steps": (2 * write * mtbf) ** 0.5 if step != 1 else 0,
    }
    reason = next((said for said, steps in known.items() if abs(found - steps) <= 1 and steps > 4), "")
    if not reason and abs(found - best) == 1:
        reason = "compare what both whole numbers beside the best t lose; the nearer one is not always the better"
    raise Wrong(
        f"{found:,} steps, expected {best:,}" + (f": {reason}" if reason else ""),
        f"  {found:,} steps lose {mine:.4%} of the time, {best:,} lose {least:.4%}",
    )


def order(size: int, epoch: int, seed: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


@on_ranks(1)
def test_ResumableSampler(answer: Answer, group: WatchedGroup) -> None:
    for size in (1, 10, 23, 24):
        for ranks in (1, 2, 3, 4):
            case(f"{size} samples on {ranks} ranks, two epochs")
            judge_epochs(answer, size, ranks)
    for ranks, draws, others in (
        (2, 3, 2),
        (2, 3, 3),
        (3, 2, 2),
        (1, 5, 4),
        (4, 1, 1),
        (4, 5, 3),
        (2, 0, 3),
        (2, 12, 3),
        (3, 8, 2),
        (5, 5, 2),
    ):
        case(f"24 samples, saved by {ranks} ranks after {draws} samples each, loaded by {others}")
        judge_resume(answer, 24, ranks, draws, others)
    case("left in the middle, and gone on with")
    sampler = answer.ResumableSampler(10, ranks=2, rank=0, seed=3)
    halves = [*islice(sampler, 2), *sampler]
    require(halves == order(10, 0, 3)[::2], f"an iterator after one that was left takes {halves[2:]}: it must go on")
    case("saved after 3 samples of the second epoch")
    drawn, resumed = [*islice(sampler, 3)], answer.ResumableSampler(10, ranks=2, rank=0, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    both, epochs = [*drawn, *islice(resumed, 10)], [order(10, epoch, 3)[::2] for epoch in (0, 1)]
    require(both[3:] != epochs[0][3:], "the rest is of the first epoch's order: the state must say which epoch it is")
    require(both == epochs[1], f"the epoch takes {both}, expected {epochs[1]}")


def judge_epochs(answer: Answer, size: int, ranks: int) -> None:
    samplers = [answer.ResumableSampler(size, ranks=ranks, rank=rank, seed=5) for rank in range(ranks)]
    for epoch in (0, 1):
        before = torch.get_rng_state()
        taken = [list(islice(sampler, size + 1)) for sampler in samplers]
        require(
            torch.equal(before, torch.get_rng_state()),
            "torch's own generator has moved: dropout and all else that is random would change. Use torch.Generator()",
        )
        others = [index for index in chain(*taken) if not isinstance(index, int)]
        require(not others, f"it yields {others[:1]}, expected the number of a sample, an int")
        judge_once(sorted(chain(*taken)), range(size), "an epoch")
        expected = [order(size, epoch, 5)[rank::ranks] for rank in range(ranks)]
        if epoch and taken == [order(size, 0, 5)[rank::ranks] for rank in range(ranks)] != expected:
            raise Wrong("the second epoch has the first one's order: its seed is seed + epoch")
        require(
            taken == expected,
            f"the ranks take {taken}, expected {expected}: of torch.randperm, by a generator with seed + epoch",
        )


def judge_once(found: list[int], expected: Any, what: str) -> None:
    twice = sorted({i for i in found if found.count(i) > 1})
    missing = sorted(set(expected) - set(found))
    require(not twice, f"{what} takes samples {twice} twice: nothing is padded, nothing begins anew")
    require(not missing, f"{what} never takes samples {missing}: nothing is dropped")
    require(found == sorted(expected), f"{what} takes {found}, expected {sorted(expected)}")


def judge_resume(answer: Answer, size: int, ranks: int, draws: int, others: int) -> None:
    samplers = [answer.ResumableSampler(size, ranks=ranks, rank=rank, seed=5) for rank in range(ranks)]
    running = [iter(sampler) for sampler in samplers]
    drawn = [list(islice(one, draws)) for one in running]
    seen = list(chain(*drawn))
    full = [sampler for sampler, own in zip(samplers, drawn, strict=True) if len(own) == draws]
    held = [sampler.state_dict() for sampler in full]
    numbers = all(isinstance(value, int | float) for state in held for value in state.values())
    require(numbers, f"state_dict() is {held[:1]}, and JSON holds numbers, no tensors")
    states = [json.dumps(state) for state in held]
    for sampler in full:
        next(iter(sampler), None)
        sampler.state_dict()
    kept = [json.dumps(state) for state in held] == states
    require(kept, "a state changes after it was handed out: return a new dict each time, the caller saves it later")
    require(
        len(set(states)) == 1, f"the ranks' states differ: {', '.join(states)}", "keep what all have taken together"
    )
    resumed = [answer.ResumableSampler(size, ranks=others, rank=rank, seed=5) for rank in range(others)]
    for sampler in resumed:
        with untouched(state=(state := json.loads(states[0]))):
            sampler.load_state_dict(state)
    rest = [list(islice(sampler, size + 1)) for sampler in resumed]
    first = order(size, 0, 5)
    if len(seen) == size:
        require(any(rest), "behind a whole epoch comes an empty one: begin the next when such a state is loaded")
        expected = [order(size, 1, 5)[rank::others] for rank in range(others)]
        require(rest == expected, f"behind a whole epoch the ranks take {rest}, expected the next epoch, {expected}")
        return
    require(sorted(chain(*rest)) != sorted(first) or not seen, "the epoch begins anew: the position was not loaded")
    what = "the epoch that was cut and gone on with"
    if ranks != others:
        what = "the position counts what all ranks have taken, or another number of them cannot use it: the epoch"
    judge_once(sorted(chain(seen, *rest)), range(size), what)
    expected = [first[len(seen) + rank :: others] for rank in range(others)]
    require(rest == expected, f"the ranks take {rest}, expected {expected}: the rest of the same order")
    again = [list(islice(sampler, size + 1)) for sampler in resumed]
    judge_once(sorted(chain(*again)), range(size), "the epoch behind it")


SMALL = {"a": 5, "b": 2}
LARGE = {"embedding": 40, "norm": 3, "qkv": 27, "bias": 1, "none": 0, "out": 18}


def flat(params: dict[str, int], ranks: int) -> tuple[list[tuple[str, int] | None], int]:
    """Each element of the buffer by name and number, None for padding; and the size of a shard."""
    elements: list[tuple[str, int] | None] = [(name, i) for name, numel in params.items() for i in range(numel)]
    size = -(-len(elements) // ranks)
    return elements + [None] * (size * ranks - len(elements)), size


@on_ranks(1)
def test_reads(answer: Answer, group: WatchedGroup) -> None:
    turned = {name: LARGE[name] for name in ("qkv", "none", "out", "embedding", "bias", "norm")}
    for saved, here in ((LARGE, LARGE), (SMALL, {"b": 2, "a": 5}), (LARGE, turned)):
        for writers in (1, 2, 3, 4, 7):
            for ranks in (1, 2, 3, 4):
                for rank in range(ranks):
                    case(f"{saved} of {writers} ranks, to rank {rank} of {ranks} in the order {list(here)}")
                    judge_reads(answer, saved, writers, here, ranks, rank)
    case("two parameters of a billion elements, of 2 ranks, to rank 1 of 4")
    huge, half = {"a": 10**9, "b": 10**9}, 5 * 10**8
    found = answer.reads(huge, 2, huge, 4, 1)
    require(found == [(0, half, 2 * half, 0)], f"{str(found)[:100]}, expected one read, {(0, half, 2 * half, 0)}")


def judge_reads(
    answer: Answer, saved: dict[str, int], writers: int, here: dict[str, int], ranks: int, rank: int
) -> None:
    with untouched(saved=saved, here=here):
        found = answer.reads(saved, writers, here, ranks, rank)
    require(isinstance(found, list), f"the result is {found!r}, expected a list of (file, begin, end, at)")
    written, old = flat(saved, writers)
    wanted, size = flat(here, ranks)
    shard: list[tuple[str, int] | None] = [None] * size
    for file, begin, end, at in found:
        what = f"the read {(file, begin, end, at)}"
        require(begin < end, f"{what} is empty")
        require(0 <= file < writers, f"{what}: there are the files 0 to {writers - 1}")
        require(
            begin >= 0 and end <= old,
            f"{what} goes beyond its file, which has {old} elements: begin and end count from the file's beginning",
        )
        require(at >= 0 and at + end - begin <= size, f"{what} goes beyond the shard, which has {size} elements")
        for i in range(end - begin):
            element = written[file * old + begin + i]
            require(element is not None, f"{what} reads padding: it belongs to no parameter")
            require(shard[at + i] is None, f"{what} fills element {at + i} of the shard a second time")
            shard[at + i] = element
    judge_shard(shard, wanted[rank * size : (rank + 1) * size], here, saved, ranks)
    require(found == sorted(found, key=lambda read: read[3]), f"{found} are not in order of the place in the shard")
    begun = [(file, (written[file * old + begin] or "")[0]) for file, begin, _, _ in found]
    twice = [f"{name} of file {file}" for file, name in begun if begun.count((file, name)) > 1]
    require(not twice, f"{len(found)} reads: {', '.join(twice[:1])} is read piece by piece: a read takes all in a row")


def judge_shard(shard: list[Any], wanted: list[Any], here: dict[str, int], saved: dict[str, int], ranks: int) -> None:
    if shard == wanted:
        return
    i = next(i for i, pair in enumerate(zip(shard, wanted, strict=True)) if pair[0] != pair[1])
    said = {None: "nothing"} | {pair: f"{pair[0]}[{pair[1]}]" for pair in (*shard, *wanted) if pair is not None}
    reason = ""
    if shard[i] is None and i == sum(here.values()) // ranks < len(shard):
        reason = ": the last shard is padded, so that a shard has the elements divided by the ranks, rounded up"
    elif wanted[i] is None:
        reason = ": that is padding, nothing belongs there"
    elif shard[i] is None:
        reason = ": does that parameter go on in another file?"
    elif list(here) != list(saved):
        reason = ": the saved buffer has another order"
    raise Wrong(f"element {i} of the shard gets {said[shard[i]]}, expected {said[wanted[i]]}{reason}")
