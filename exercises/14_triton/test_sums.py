"""Grades chapter 14's kernels whose programs must not meet: a sum over rows in parts, and dropout from a seed."""

import torch
from torch import Tensor

from refimpl.grading.compare import equal
from refimpl.grading.grade import on_ranks
from refimpl.grading.kernels import bytes_of, launch, moved, random_numbers, within
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup


@on_ranks(1)
def test_column_sum_kernel(answer: Answer, group: WatchedGroup) -> None:
    for rows, cols, programs, block, dtype in (
        (11, 20, 3, 16, torch.float32),
        (6, 16, 2, 16, torch.float16),
        (2, 5, 4, 16, torch.float32),
        (0, 5, 2, 16, torch.float32),
    ):
        case(f"{rows} x {cols} {str(dtype)[6:]}, {programs} programs a column, BLOCK = {block}")
        x = within((torch.arange(rows * cols).view(rows, cols) % 7 + 2000.0).to(dtype))
        partial = within(torch.full((programs, cols), float("nan")))
        with untouched(x_ptr=x):
            c = launch(answer.column_sum_kernel, (programs, -(-cols // block)), x, partial, rows, cols, BLOCK=block)
        wanted = torch.stack([x[p::programs].double().sum(0) for p in range(programs)]).float()
        known = {"the sum is kept in 16 bits: add up in fp32": running(x, programs)}
        cut = x[: len(x) // programs * programs]
        rest = f"the last {len(x) - len(cut)} rows are left out: P need not divide their number"
        if dtype == torch.float32:
            together = "program p adds rows that lie together, expected rows p, p + P, p + 2 P, ..."
            known = {
                together + end: runs(x, programs, each)
                for end, each in (("", rows // programs), (" ", -(-rows // programs)))
            } | {rest: torch.stack([cut[p::programs].sum(0) for p in range(programs)])}
        equal(partial, wanted, "partial", known=known, rtol=1e-6)
        moved(c, bytes_of(x=x), bytes_of(partial=partial), advice="add up in the program, and store once")


def runs(x: Tensor, programs: int, each: int) -> Tensor:
    """The sums of so many rows that lie together, and of the rest of them."""
    return torch.stack([x[p * each : (p + 1) * each].sum(0) for p in range(programs)])


def running(x: Tensor, programs: int) -> Tensor:
    """Each program's sum, kept in x's dtype."""
    sums = x.new_zeros(programs, x.shape[1])
    for row in range(len(x)):
        sums[row % programs] += x[row]
    return sums.float()


@on_ranks(1)
def test_dropout_kernel(answer: Answer, group: WatchedGroup) -> None:
    for n, p, seed, block, dtype in (
        (200, 0.25, 7, 64, torch.float32),
        (200, 0.25, 7, 32, torch.float32),
        (200, 0.25, 8, 64, torch.float16),
        (33, 0.0, 1, 16, torch.float32),
        (1, 0.9, 5, 16, torch.float32),
        (64, float(random_numbers(3, 64).median()), 3, 16, torch.float32),  # one of the numbers is p itself
    ):
        case(f"{n} elements {str(dtype)[6:]}, p = {p}, seed {seed}, BLOCK = {block}")
        x, numbers = (torch.rand(n) + 1).to(dtype), random_numbers(seed, n)
        x[numbers < p / 2] = float("inf")  # dropped, whatever it is
        x, out = within(x), within(torch.full_like(x, float("nan")))
        with untouched(x_ptr=x):
            c = launch(answer.dropout_kernel, (-(-n // block),), x, out, n, p, seed, BLOCK=block)
        keep, z = numbers >= p, x.double()
        local = random_numbers(seed, block).repeat(-(-n // block))[:n] >= p

        def dropped(keep: Tensor, p: float = p, z: Tensor = z, dtype: torch.dtype = dtype) -> Tensor:
            return torch.where(keep, z / (1 - p), 0).to(dtype)

        known = {
            "p is the share that is kept here, and must be the share that is dropped": dropped(~keep),
            "where the number is p itself the element is kept: >=, not >": dropped(numbers > p),
            "kept is where the number is at least p; below 1 - p are as many, but others": dropped(numbers < 1 - p),
            "what is kept must be divided by 1 - p": dropped(keep, 0.0),
            "it is divided by p, and must be by 1 - p": dropped(keep, 1 - max(p, 1e-9)),
            "what is kept is multiplied by 1 - p: it must be divided": (dropped(keep, 0.0).double() * (1 - p)).to(
                dtype
            ),
            "every program drops the same lanes: the offset of tl.rand must be the element's number": dropped(local),
            "what is dropped is 0, also where x is infinite: choose by tl.where, 0 times it is NaN": (
                z * keep / (1 - p)
            ).to(dtype),
            "the seed is not used": dropped(random_numbers(0, n) >= p),
        }
        if (out.isinf() & (numbers < p)).any():  # of other numbers: none of those above
            known["elements are kept whose number, tl.rand(seed, i), is below p"] = out.clone()
        equal(out, dropped(keep), "out", known=known, rtol=2e-3 if dtype == torch.float16 else 1e-6)
        # What is dropped need not be loaded.
        kept = int(keep.sum()) * x.element_size()
        moved(c, {"x_ptr": kept}, bytes_of(out=out), optional={"x_ptr": x.numel() * x.element_size() - kept})
