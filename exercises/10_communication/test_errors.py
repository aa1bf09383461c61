"""Grades chapter 10's compressed means with errors: what servers add, and what each error holds over several steps."""

from typing import Any

import torch
from torch import Tensor

from refimpl.grading.compare import close, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import in_place, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def other(known: dict[str, Tensor], expected: Tensor) -> dict[str, Tensor]:
    """Of well-known mistakes those that can be told from what is right."""
    return {s: t for s, t in known.items() if t.shape != expected.shape or not close(t, expected)}


def same_bits(group: WatchedGroup, found: Any, what: str) -> None:
    every = group.everyone(found)
    require(
        all(torch.equal(every[0], t) for t in every), f"{what} has other bits on other ranks: they would drift apart"
    )


def signs(x: Tensor, scale: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0) * scale


class OneBit:
    """All ranks of the two-sided exchange in one process."""

    def __init__(self, ranks: int, n: int) -> None:
        self.workers = [torch.zeros(n) for _ in range(ranks)]
        self.servers = [torch.zeros(n // ranks) for _ in range(ranks)]

    def step(self, every: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The result, what each server had before it compressed, and what each rank sent."""
        ranks, sent = len(every), []
        for i, x in enumerate(every):
            whole = x + self.workers[i]
            sent.append(signs(whole, whole.abs().mean()))
            self.workers[i] = whole - sent[i]
        means = list(torch.stack(sent).mean(0).chunk(ranks))
        inputs = [mean + error for mean, error in zip(means, self.servers, strict=True)]
        out = [signs(whole, whole.abs().mean()) for whole in inputs]
        self.servers = [whole - o for whole, o in zip(inputs, out, strict=True)]
        return torch.cat(out), inputs, sent


@on_ranks(2, 3, 4)
def test_one_bit_mean(answer: Answer, group: WatchedGroup) -> None:
    ranks, rank = group.size, group.rank
    for per in (8, 24):
        n = ranks * per
        truth = OneBit(ranks, n)
        worker, server = torch.zeros(n), torch.zeros(per)
        for step in range(4):
            case(f"{n} elements, step {step}")
            every = [random(n, seed=100 * step + r) * (1 + r) for r in range(ranks)]
            for x in every:
                x[:: 3 + step] = 0
            x, before = every[rank].clone(), (worker.clone(), server.clone())
            with untouched(x=x), in_place(worker=worker, server=server):
                found = answer.one_bit_mean(x, worker, server, group)
            result, inputs, sent = truth.step(every)
            judge_bits_traffic(group, n)
            judge_error("worker", worker, truth.workers[rank], before[0], every[rank] + before[0], result)
            judge_one_bit(found, result, every, sent, inputs, rank)
            same_bits(group, found, "the mean")
            judge_error("server", server, truth.servers[rank], before[1], inputs[rank], result)
    case("zeros everywhere")
    worker, server = torch.zeros(8 * ranks), torch.zeros(8)
    equal(answer.one_bit_mean(torch.zeros(8 * ranks), worker, server, group), torch.zeros(8 * ranks), "the mean")
    case("numbers whose sum depends on the order: 1 on rank 0, 3e7 on rank 1, -3e7 on the last")
    x = torch.full((8 * ranks,), {0: 1.0, 1: 3e7, ranks - 1: -3e7}.get(rank, 0.0))
    found = answer.one_bit_mean(x, worker, server, group)
    same_bits(group, found, "the mean (added in rank order)")
    right = torch.full_like(x, -3e7 / 2 + 0.5 if ranks == 2 else 0.0)
    equal(found, right, "the mean (added in fp32, in rank order)", atol=0.1)


def judge_one_bit(
    found: Any, result: Tensor, every: list[Tensor], sent: list[Tensor], inputs: list[Tensor], rank: int
) -> None:
    ranks = len(every)
    mean = torch.stack(sent).mean(0)
    bare = torch.cat([signs(m, m.abs().mean()) for m in mean.chunk(ranks)])
    by_norm = torch.cat([signs(w, w.norm() / len(w) ** 0.5) for w in inputs])
    ones = torch.cat([signs(w, torch.ones(())) for w in inputs])
    own = torch.cat([signs(w, inputs[rank].abs().mean()) for w in inputs])
    scales = torch.stack([each.abs().max() for each in sent])
    moved = torch.stack([signs(each, scales.mean()) for each in sent]).mean(0) - mean
    alike = torch.cat([signs(w, w.abs().mean()) for w in (torch.cat(inputs) + moved).chunk(ranks)])
    means = torch.cat(inputs) - mean  # the servers' errors
    divided = torch.cat([signs(w, w.abs().mean()) for w in (mean + means / ranks).chunk(ranks)])
    known = {
        "not compressed a second time: the servers' means are sent as they are": mean,
        "the servers forget: `server` is to be added before they compress": bare,
        "the servers' scale is the root of the mean square: here it is the mean magnitude": by_norm,
        "signs without a scale": ones,
        "the workers' signs count alike: each brings its own scale": alike,
        "this rank's own scale for the chunks of all servers: each has its own": own,
        "the exact mean: nothing is compressed": torch.stack(every).mean(0),
        "a server's error is divided by the ranks too: only what they sent is": divided,
    }
    equal(found, result, "the mean", ranks=ranks, known=other(known, result), rtol=1e-4, atol=1e-5)


def judge_error(name: str, found: Tensor, right: Tensor, before: Tensor, whole: Tensor, result: Tensor) -> None:
    by_norm, by_most = (whole - signs(whole, by) for by in (whole.norm() / len(whole) ** 0.5, whole.abs().max()))
    alone = whole - before
    known = {
        "without the old error: it is to be added before the signs are taken": alone - signs(alone, alone.abs().mean()),
        "it is as before: what was missed belongs into it, in place": before,
        "all that was to be sent: what was sent is to be taken off": whole,
        "what was missed by signs times the root of the mean square: the scale is the mean magnitude": by_norm,
        "what was missed by signs times the largest magnitude: the scale is the mean magnitude": by_most,
        "added to the old error, which was sent already": right + before,
        "0 where the sign is of 0, as if nothing was sent: its bit says +": torch.where(whole == 0, 0.0, right),
    }
    if result.shape == whole.shape:
        known["whole - the mean that came back: it is what *this rank's* signs missed"] = whole - result
    equal(found, right, f"`{name}`", known=other(known, right), rtol=1e-4, atol=1e-5)


def judge_bits_traffic(group: WatchedGroup, n: int) -> None:
    oracle, bits, one = group.oracle(), torch.zeros(n // 8, dtype=torch.uint8), torch.zeros(1)
    oracle.all_to_all(torch.empty_like(bits), bits)
    oracle.all_gather(torch.empty(group.size), one)
    oracle.all_gather(torch.empty_like(bits), bits.chunk(group.size)[0])
    oracle.all_gather(torch.empty(group.size), one)
    sent, right = (sum(g.ledger.sent_bytes().values()) for g in (group, oracle))
    require(sent < 3 * right, f"{sent:,} bytes leave this rank, {right:,} are enough: eight signs go into a byte")
    same_traffic(group, oracle, "one_bit_mean")
    group.ledger.reset()


@on_ranks(2, 3, 4)
def test_power_sgd(answer: Answer, group: WatchedGroup) -> None:
    ranks, rank = group.size, group.rank
    for a, b, r in ((6, 4, 2), (3, 7, 1), (5, 9, 3)):
        start = random(b, r, seed=1)
        q, error = start.clone(), torch.zeros(a, b)
        truth, errors = start.clone(), [torch.zeros(a, b) for _ in range(ranks)]
        for step in range(4):
            case(f"[{a}, {b}], rank {r}, step {step}")
            every = [random(a, b, seed=50 * step + i) for i in range(ranks)]
            whole = [g + e for g, e in zip(every, errors, strict=True)]
            grad, before, old = every[rank].clone(), error.clone(), truth
            with untouched(grad=grad), in_place(error=error, q=q):
                found = answer.power_sgd(grad, error, q, group)
            mean = torch.stack(whole).mean(0)
            p = torch.linalg.qr(mean @ truth)[0]
            truth = mean.T @ p
            result = p @ truth.T
            errors = [w - result for w in whole]
            judge_power_traffic(group, a, b, r)
            judge_power(found, result, every, whole, old, p, rank)
            same_bits(group, found, "the result")
            judge_power_error(error, errors[rank], before, whole[rank], mean, every[rank], result, p)
            judge_q(q, truth, old, whole[rank].T @ p, ranks)
    case("gradients of zeros, then others")
    q, error = random(4, 2, seed=1), torch.zeros(6, 4)
    nothing = answer.power_sgd(torch.zeros(6, 4), error, q, group)
    equal(nothing, torch.zeros(6, 4), "the result")
    require(
        bool(q.isfinite().all() and error.isfinite().all()), "q or the error is not finite after a gradient of zeros"
    )


def judge_power(
    found: Any, result: Tensor, every: list[Tensor], whole: list[Tensor], q: Tensor, p: Tensor, rank: int
) -> None:
    mean = torch.stack(whole).mean(0)
    bare = torch.stack(every).mean(0)
    forgetful = torch.linalg.qr(bare @ q)[0]
    raw = mean @ q
    unit, small = raw / raw.norm(dim=0), raw / raw.norm()
    each = torch.stack([torch.linalg.qr(w @ q)[0] for w in whole]).mean(0)
    known = {
        "the exact mean: nothing is compressed": mean,
        "of the gradients alone: the error is to be added first": forgetful @ (forgetful.T @ bare),
        "P's columns are not orthonormal": raw @ (mean.T @ raw).T,
        "P's columns are not orthonormal: the norm of all of P divides it": small @ (mean.T @ small).T,
        "the new q is a sum over ranks, not their mean": result * len(every),
        "the new q is this rank's own": p @ p.T @ whole[rank],
        "the new q is this rank's own: sum M' P over ranks before dividing": p @ p.T @ whole[rank] / len(every),
        "P's columns have length 1, but are not orthogonal": unit @ (mean.T @ unit).T,
        "each rank's P is made orthonormal, and then their mean taken: first the mean of M q": each @ (mean.T @ each).T,
    }
    equal(found, result, "the result", ranks=len(every), known=other(known, result), rtol=1e-3, atol=1e-4)


def judge_power_error(
    error: Tensor, right: Tensor, before: Tensor, own: Tensor, mean: Tensor, grad: Tensor, result: Tensor, p: Tensor
) -> None:
    known = {
        "it is as before: it is to be changed in place": before,
        "what the ranks' mean has beyond the result: the error is this rank's own": mean - result,
        "what grad has beyond the result: grad + the old error is what was to be sent": grad - result,
        "all of it: the result is to be taken off": own,
        "what this rank's own M' P leaves: take off the result, which all ranks have alike": own - p @ (p.T @ own),
    }
    equal(error, right, "the error", known=other(known, right), rtol=1e-3, atol=1e-4)


def judge_q(q: Tensor, truth: Tensor, old: Tensor, own: Tensor, ranks: int) -> None:
    stays = {
        "it is as before: the next step is to begin where this one ended, in place": old.abs(),
        "this rank's own M' P: it is the mean over ranks": own.abs(),
        "the sum over ranks: it is their mean": truth.abs() * ranks,
    }
    # A column of P, and with it of q, may have either sign.
    equal(q.abs(), truth.abs(), "q", known=other(stays, truth.abs()), rtol=1e-3, atol=1e-4)


def judge_power_traffic(group: WatchedGroup, a: int, b: int, r: int) -> None:
    oracle, sent = group.oracle(), sum(group.ledger.sent_bytes().values())
    oracle.all_reduce(torch.zeros(a * r))
    oracle.all_reduce(torch.zeros(b * r))
    right, dense = sum(oracle.ledger.sent_bytes().values()), group.oracle()
    dense.all_reduce(torch.zeros(a * b))
    whole = sum(dense.ledger.sent_bytes().values())
    require(
        sent != whole or sent == right,
        f"the whole matrix is all-reduced, {sent:,} bytes: P and q are enough, {right:,}",
    )
    same_traffic(group, oracle, "power_sgd", calls=False)
    group.ledger.reset()
