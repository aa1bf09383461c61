"""Grades chapter 04's pieces: which elements of which parameter lie in a shard, by a label on every element."""

from refimpl.grading.compare import Wrong, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup


@on_ranks(1)
def test_pieces_of(answer: Answer, group: WatchedGroup) -> None:
    for sizes in ([3, 4], [4, 4], [10], [1, 1, 1], [7, 1, 12, 5], [2, 0, 3], [1]):
        for ranks in (1, 2, 3, 4, 9):
            shard = -(-sum(sizes) // ranks)
            for rank in range(ranks):
                case(f"sizes {sizes}, rank {rank} of {ranks}, shards of {shard}")
                with untouched(sizes=sizes):
                    found = answer.pieces_of(sizes, ranks, rank)
                judge_pieces(found, sizes, ranks, rank)
    case("two parameters of a billion elements each, rank 2 of 4")
    found = [tuple(piece) for piece in answer.pieces_of([10**9, 10**9], 4, 2)]
    require(found == [(1, 0, 5 * 10**8)], f"{str(found)[:100]}, expected {[(1, 0, 5 * 10**8)]}")


def labelled(sizes: list[int], shard: int, rank: int) -> list[tuple[int, int, int]]:
    """The pieces in a shard, by giving every single element of the buffer a label."""
    labels = [(number, i) for number, size in enumerate(sizes) for i in range(size)][rank * shard : (rank + 1) * shard]
    inside = {number: [i for n, i in labels if n == number] for number, _ in labels}
    return [(number, elements[0], elements[-1] + 1) for number, elements in inside.items()]


def judge_pieces(found: object, sizes: list[int], ranks: int, rank: int) -> None:
    shard = -(-sum(sizes) // ranks)
    first, expected = rank * shard, labelled(sizes, shard, rank)
    triples = isinstance(found, list) and all(isinstance(piece, tuple | list) and len(piece) == 3 for piece in found)
    require(triples, f"the result is {str(found)[:100]}, expected a list of (number, start, stop)")
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
    whole, split = (all((a, b) == (0, sizes[n]) for n, a, b in pieces) for pieces in (found, expected))
    require(
        split or not whole or not found,
        "whole parameters are given out: a parameter that lies across shards has a piece in each",
        *evidence,
    )
    raise Wrong(which_piece([n for n, _, _ in found], {n: (a, b) for n, a, b in found}, expected), *evidence)


def which_piece(numbers: list[int], found: dict[int, tuple[int, int]], expected: list[tuple[int, int, int]]) -> str:
    """The first fault in a list of pieces, in a sentence."""
    wanted = {n: (a, b) for n, a, b in expected}
    for n, piece in wanted.items():
        if n not in found:
            return f"parameter {n} is left out: elements {piece[0]} to {piece[1]} of it lie in this shard"
    for n, (a, b) in found.items():
        if n not in wanted:
            return f"parameter {n} has nothing in this shard: it lies before it or behind it"
        if a != wanted[n][0]:
            return f"the piece of parameter {n} begins at element {a}, expected {wanted[n][0]}: where the shard begins"
        if b != wanted[n][1]:
            return f"the piece of parameter {n} ends before element {b}, expected {wanted[n][1]}: where the shard ends"
    if len(numbers) > len(found):
        return "a parameter has two pieces in one shard: it has one at most"
    return "the pieces are not in the order of the buffer"
