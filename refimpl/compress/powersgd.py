"""PowerSGD: a matrix [n, m] as the product of two thin ones, P [n, r] and Q [m, r], by one step of power iteration.

    P = M Q      P^ = an orthonormal basis of its columns      Q' = M^T P^      C(M) = P^ Q'^T = P^ P^^T M

A projection, so a contraction; on average over Q drawn at random b = 1 - r / min(n, m), and far less where M is near
low rank or Q is the last step's (`LowRank`, which is how ranks use it: there P and Q are averaged by two all-reduces,
which makes C(M) that of the mean over ranks). r (n + m) values in the place of n m.
Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2. torch: torch/distributed/algorithms/ddp_comm_hooks/
powerSGD_hook.py, whose settings are these; DeepSpeed has none.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.comm.work import Steps
from refimpl.compress.compressor import Compressor, Layout, Wire, flat, generator
from refimpl.compress.exchange import Exchange, Op


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Rank `rank`, or the matrix's own where that is less. ValueError unless rank is at least 1.

    As an operator for itself it takes x [n] for a matrix as square as n allows, with zeros at its end, and draws Q.
    `LowRank` sends what would not become `least_ratio` times smaller whole, as vectors.
    """

    rank: int = 4
    least_ratio: float = 2.0
    warm_start: bool = True  # begin with the last step's Q
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"PowerSGD: rank is {self.rank!r}; it must be a whole number, 1 or more")

    def layout(self, n: int, dtype: torch.dtype) -> Layout:
        rows, columns = square(n)
        r = self.rank_of(rows, columns)
        return [(rows * r, dtype), (columns * r, dtype)] if n else []

    def compress(self, x: Tensor, turn: int = 0) -> Wire:
        """x [n] -> P^ [rows r], Q [columns r], row by row, in x's dtype."""
        x = flat(x)
        if not len(x):
            return ()
        rows, columns = square(len(x))
        matrix = torch.nn.functional.pad(x.float(), (0, rows * columns - len(x))).view(rows, columns)
        p = orthonormal(matrix @ self.first_q(rows, columns, turn, x.device))
        return p.to(x.dtype).reshape(-1), (matrix.T @ p).to(x.dtype).reshape(-1)

    def add_to(self, total: Tensor, wire: Wire, sign: float = 1.0, turn: int = 0) -> None:
        rows, columns = square(len(total))
        p, q = (part.to(total.dtype).view(-1, self.rank_of(rows, columns)) for part in wire)
        total.add_((p @ q.T).view(-1)[: len(total)], alpha=sign)

    def error_bound(self, n: int) -> float:
        rows, columns = square(n)
        return 1 - self.rank_of(rows, columns) / min(rows, columns) if n else 0.0

    def rank_of(self, rows: int, columns: int) -> int:
        return min(self.rank, rows, columns)

    def takes(self, rows: int, columns: int) -> bool:
        """Whether a matrix becomes small enough."""
        return (rows + columns) * self.rank_of(rows, columns) * self.least_ratio < rows * columns

    def first_q(self, rows: int, columns: int, turn: int, device: torch.device) -> Tensor:
        """Normal numbers, the same on every rank: [columns, r]."""
        shape = (columns, self.rank_of(rows, columns))
        return torch.randn(shape, generator=generator(self.seed, turn, device), device=device)


class LowRank(Exchange):
    """The mean of the ranks' matrices: P is averaged and made orthonormal, then Q is averaged. Two all-reduces.

    `shapes`: of the tensors that lie end to end in x [n]; each is a matrix [first dimension, the others]. What PowerSGD
    does not take travels whole beside P. A rank sends 2 (N-1)/N of r (rows + columns) values a matrix and of the rest.
    As in torch the error is what this rank had less the ranks' common C(M); its sum over ranks is that of the paper's.
    """

    def __init__(
        self,
        group: Group,
        compressor: PowerSGD,
        n: int,
        shapes: list[torch.Size],
        feedback: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(group, compressor, n, feedback, None, dtype)
        self.power = compressor
        self.matrices: list[tuple[int, int, int]] = []  # where it begins in x, rows, columns
        self.vectors: list[tuple[int, int]] = []  # begin, end
        at = 0
        for shape in shapes:
            rows, numel = shape[0] if len(shape) else 1, math.prod(shape)
            if numel and compressor.takes(rows, numel // rows):
                self.matrices.append((at, rows, numel // rows))
            elif numel:
                self.vectors.append((at, at + numel))
            at += numel
        if at != n:
            raise ValueError(f"LowRank of [{n}]: the shapes have {at} numbers")
        self.q: list[Tensor] = []  # [columns, r] each, since the first call
        self._q_before: list[Tensor] | None = None

    def steps(self, x: Tensor, out: Tensor, op: Op) -> Steps:
        y = self.worker[0].corrected(x) if self.feedback else x.to(torch.float32, copy=True)  # out may be x
        q = self.begin_with(y.device)
        p = [m @ q for m, q in zip(self.rows(y), q, strict=True)]
        first = torch.cat([*(y[start:end] for start, end in self.vectors), *(one.view(-1) for one in p)]).to(self.dtype)
        yield lambda: [self.group.all_reduce(first, "mean", async_op=True, tag=self.tag)]
        first = first.float()
        lengths = [end - start for start, end in self.vectors] + [one.numel() for one in p]
        parts: list[Tensor] = list(first.split(lengths))  # type: ignore[no-untyped-call]
        sums = zip(parts[len(self.vectors) :], p, strict=True)
        bases = [orthonormal(mean.view(one.shape)) for mean, one in sums]
        second = torch.cat([(m.T @ p).reshape(-1) for m, p in zip(self.rows(y), bases, strict=True)] or [first[:0]])
        second = second.to(self.dtype)
        yield lambda: [self.group.all_reduce(second, "mean", async_op=True, tag=self.tag)] if len(second) else []
        self.finish(y, out, parts, bases, second.float())
        if op == "sum":
            out.mul_(self.group.size)

    def finish(self, y: Tensor, out: Tensor, vectors: list[Tensor], bases: list[Tensor], second: Tensor) -> None:
        """out = the vectors' mean and P^ Q^T; the error is what y has beyond that."""
        for (start, end), mean in zip(self.vectors, vectors, strict=False):
            out[start:end] = mean
            y[start:end] = mean
        self._q_before = self.q if self._q_before is None else self._q_before
        self.q, at = [], 0
        for target, p in zip(self.rows(out), bases, strict=True):
            q = second[at : at + target.shape[1] * p.shape[1]].view(target.shape[1], p.shape[1])
            torch.mm(p, q.T, out=target)
            self.q.append(q.clone())  # where a loaded one would lie: BLAS's last bit depends on the alignment
            at += q.numel()
        if self.feedback:
            self.worker[0].keep(y.sub_(out))

    def begin_with(self, device: torch.device) -> list[Tensor]:
        """The last call's Q, or one drawn at random."""
        if self.q and self.power.warm_start:
            return self.q
        draws = enumerate(self.matrices, self.turn * len(self.matrices))
        return [self.power.first_q(rows, columns, turn, device) for turn, (_, rows, columns) in draws]

    def rows(self, flat: Tensor) -> Iterator[Tensor]:
        """The matrices in flat [n], as views."""
        for start, rows, columns in self.matrices:
            yield flat[start : start + rows * columns].view(rows, columns)

    def sent_bytes(self) -> int:
        ranks = [self.power.rank_of(rows, columns) for _, rows, columns in self.matrices]
        whole = sum(end - start for start, end in self.vectors)
        p = sum(r * rows for r, (_, rows, _) in zip(ranks, self.matrices, strict=True))
        q = sum(r * columns for r, (_, _, columns) in zip(ranks, self.matrices, strict=True))
        return self.reduced_bytes(whole + p, self.dtype) + self.reduced_bytes(q, self.dtype)

    def accept(self) -> None:
        super().accept()
        self._q_before = None

    def revert(self, start: int = 0, end: int | None = None) -> None:
        super().revert(start, end)
        before, end = self._q_before, self.n if end is None else end
        if before is not None and start == 0 and end == self.n:
            self.q = list(before)
        elif before:
            for i, (at, _, _) in enumerate(self.matrices):
                if start <= at < end:
                    self.q[i] = before[i]

    def accepted_q(self) -> list[Tensor]:
        """Q as of the last `accept`."""
        return self.q if self._q_before is None else self._q_before

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.q, *(self._q_before or [])]


def square(n: int) -> tuple[int, int]:
    """Rows and columns of the smallest matrix with n numbers that is as square as can be."""
    rows = math.isqrt(n)
    return rows, -(-n // max(rows, 1))


def orthonormal(p: Tensor) -> Tensor:
    """p [n, r], r <= n -> as many orthonormal columns that span at least p's, also where p has not rank r."""
    basis: Tensor = torch.linalg.qr(p)[0]
    return basis
