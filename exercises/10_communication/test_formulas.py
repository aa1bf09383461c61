"""Grades chapter 10's formulas: what a second says of a link, how large a bucket is, what crosses between nodes."""

import math
from collections.abc import Mapping
from typing import Any

from refimpl.grading.compare import Wrong, refused, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup


def same(found: Any, expected: float, what: str, known: Mapping[str, float]) -> None:
    """Raise Wrong unless both are equal, with the mistake's sentence where one is known."""
    require(isinstance(found, int | float), f"{what} is {found!r}, expected a number")
    if math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12):
        return
    said = [s for s, value in known.items() if math.isclose(found, value, rel_tol=1e-9, abs_tol=1e-12)]
    raise Wrong(
        f"{what}: {said[0]}" if said else f"{what} is wrong", f"  expected {expected:.6g}", f"  found    {found:.6g}"
    )


@on_ranks(1)
def test_bus_bandwidth(answer: Answer, group: WatchedGroup) -> None:
    once = {"reduce_scatter", "all_gather", "all_to_all"}
    for op in ("all_reduce", *sorted(once), "broadcast", "send"):
        for ranks in (2, 8, 1):
            case(f"{op} of 8,000,000,040 bytes handed in on {ranks} ranks in 0.125 s")
            found = answer.bus_bandwidth(op, 8_000_000_040, ranks, 0.125)
            two = isinstance(found, tuple | list) and len(found) == 2
            require(two, f"the result is {found!r}, expected two numbers")
            share, own_size = (ranks - 1) / ranks, 8_000_000_040 / 0.125
            size = own_size * (ranks if op == "all_gather" else 1)
            bus = size * (2 * share if op == "all_reduce" else share if op in once else 1)
            own = {"in bits: bytes a second are asked": 8 * size}
            if op == "all_gather":
                own["an all-gather is handed one chunk: the whole buffer is N times that"] = own_size
            elif op == "all_reduce":
                own["doubled: a buffer is as large as it is, the 2 belongs into the bus bandwidth"] = 2 * size
            else:
                own[f"{op} is handed the whole buffer: it is not N times that"] = own_size * ranks
            if bus != size:
                own["it is the bus bandwidth: that comes second"] = bus
            same(found[0], size, "the algorithm bandwidth", own)
            wrong = {"the algorithm bandwidth: how much must a rank send for each byte of the buffer?": size}
            if op == "all_reduce":
                wrong["an all-reduce moves each chunk twice: 2 (N - 1) / N"] = size * share
            elif op in once:
                wrong["2 (N - 1) / N is an all-reduce's factor: here each chunk moves once"] = size * 2 * share
                wrong["the factor multiplies: a link carries (N - 1) / N of the buffer"] = size / max(share, 0.1)
            else:
                wrong[f"{op}: all of the buffer leaves the rank, the factor is 1"] = size * share
                wrong[f"{op}: a rank sends the buffer once, the others pass it on"] = size * (ranks - 1)
            same(found[1], bus, "the bus bandwidth", wrong)
    case("all_gather of 100 bytes on 2 ranks in 3 s: not a whole number of bytes a second")
    same(
        answer.bus_bandwidth("all_gather", 100, 2, 3.0)[0],
        200 / 3,
        "the algorithm bandwidth",
        {"rounded down: divide by /, not //": 200 // 3},
    )
    case("all_reduced, an operation that is none: a ValueError is expected")
    try:
        with refused(ValueError, "all_reduced is no operation"):
            found = answer.bus_bandwidth("all_reduced", 8, 2, 1.0)
    except ValueError:
        return
    raise Wrong(f"all_reduced is no operation, and gives {found!r}: raise a ValueError")


def played(nbytes: float, backward: float, alpha: float, beta: float, number: int, queue: bool = True) -> float:
    done = 0.0
    for i in range(1, number + 1):
        done = max(done if queue else 0.0, backward * i / number) + alpha + beta * nbytes / number
    return done - backward


LINKS = {
    "the example": (100, 1.0, 0.1, 0.005, 20),
    "a fast link: only the last bucket is seen": (1000, 1.0, 1e-3, 1e-5, 40),
    "a slow link: it never catches up": (1000, 1.0, 1e-2, 4e-3, 60),
    "many would be best, 3 are allowed": (1000, 1.0, 1e-4, 9e-4, 3),
    "a bucket costs more than backward": (10, 0.1, 1.0, 1e-3, 8),
    "no latency": (100, 2.0, 0.0, 0.05, 9),
    "one bucket is allowed": (100, 1.0, 0.1, 0.005, 1),
    "a link that costs nothing, where all are equally good": (100, 1.0, 0.0, 0.0, 2),
}


@on_ranks(1)
def test_best_buckets(answer: Answer, group: WatchedGroup) -> None:
    for name, (nbytes, backward, alpha, beta, most) in LINKS.items():
        case(f"{name}: {nbytes} bytes, backward {backward} s, alpha {alpha}, beta {beta}, at most {most}")
        found = answer.best_buckets(nbytes, backward, alpha, beta, most)
        require(isinstance(found, tuple) and len(found) == 2, f"the result is {found!r}, expected (number, seconds)")
        every = {b: played(nbytes, backward, alpha, beta, b) for b in range(1, most + 1)}
        best = min(every, key=lambda b: every[b])
        alone = {b: played(nbytes, backward, alpha, beta, b, queue=False) for b in every}
        wrong = {
            max(1, min(most, round(math.sqrt(backward / alpha)) if alpha else most)): (
                "sqrt(backward / alpha) holds where the link is slower than backward, and for no whole number"
            ),
            min(alone, key=lambda b: alone[b]): "each costs alpha, and waits until the one before has arrived",
        }
        shown = [
            f"  {b} buckets expose {every[b]:.6g} s" for b in sorted({best, max(1, best - 1), min(most, best + 1)})
        ]
        number, seconds = found
        require(type(number) is int, f"the number is {number!r}, expected an int")
        if number > best and every.get(number) == every[best]:
            raise Wrong(f"{number} buckets are as good as {best}: of equally good ones the smallest is asked", *shown)
        if number != best:
            raise Wrong(f"{number} buckets are not the best: " + wrong.get(number, f"{best} expose less"), *shown)
        known = {
            "it begins at the end of backward, what comes before is hidden": every[best] + backward,
            "the whole transfer: what runs beside backward is hidden": best * alpha + beta * nbytes,
            "the last bucket alone: those before it may be waiting too": alpha + beta * nbytes / best,
        }
        same(seconds, every[best], "the exposed time", known)


@on_ranks(1)
def test_bytes_across(answer: Answer, group: WatchedGroup) -> None:
    sizes = ((800, 2, 1, 20), (7680, 3, 4, 256), (4096, 1, 2, 64), (2**20, 8, 2, 2048))
    for params, nodes, micro, block in sizes:
        for strategy in ("zero3", "zero++", "mics"):
            case(f"{strategy}, {params} parameters, {nodes} nodes, {micro} micro-batches, blocks of {block}")
            found = answer.bytes_across(strategy, params, nodes, micro, block)
            keys = {"forward", "backward", "gradients"}
            require(isinstance(found, dict) and set(found) == keys, f"the result is {found!r}, expected {sorted(keys)}")
            out = params * (nodes - 1) / nodes
            zero3 = dict.fromkeys(keys, 2 * out * micro)
            plus = {
                "forward": out * micro * (1 + 4 / block),
                "backward": 0.0,
                "gradients": out * micro * (0.5 + 4 / block),
            }
            mics = {"forward": 0.0, "backward": 0.0, "gradients": 4 * out}
            expected = {"zero3": zero3, "zero++": plus, "mics": mics}[strategy]
            for key in ("forward", "backward", "gradients"):
                right = expected[key]
                known = {
                    "1 / nodes of the parameters: so much stays in the node, all the rest crosses": right
                    / max(1, nodes - 1),
                    f"{micro} micro-batches each do it": right / micro,
                    "once a step, not for each micro-batch: in between gradients are added up inside the node": right
                    * micro,
                    "all of the parameters: 1 / nodes of them stay in the node": right * nodes / max(1, nodes - 1),
                    "the scales travel too": out * micro * {"forward": 1.0, "gradients": 0.5}.get(key, 0.0),
                    "the scales are fp32, 4 bytes a block": right - out * micro * 2 / block,
                    "hpZ keeps the weights a second time inside the node: nothing crosses": out
                    * micro
                    * (1 + 4 / block),
                    "hpZ gathers inside the node: nothing crosses, in 16 bits or in 8": 2 * out * micro,
                    "int4 are half a byte an element": out * micro * (1 + 4 / block),
                    "16 bits are 2 bytes an element": right / 2,
                    "an all-reduce is a reduce-scatter and an all-gather: each crosses": right / 2,
                    "bits, where bytes are asked": right * 8,
                }
                if strategy != "zero++":
                    del known["the scales travel too"]
                if strategy == "mics":
                    del known["16 bits are 2 bytes an element"]
                if key != "backward":
                    known = {said: value for said, value in known.items() if not said.startswith("hpZ")}
                same(found[key], right, f"{key} of {strategy}", known)
    case("zero2, a strategy that is none: a ValueError is expected")
    try:
        with refused(ValueError, "zero2 is none of the three"):
            found = answer.bytes_across("zero2", 8, 2, 1, 4)
    except ValueError:
        return
    raise Wrong(f"zero2 is none of the three, and gives {found!r}: raise a ValueError")
