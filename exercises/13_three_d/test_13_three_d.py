"""Grades chapter 13's context on one rank: attention in parts, who has which tokens, and their targets."""

import math
from typing import Any

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

IGNORED = -100
INF = math.inf


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Out and lse in fp64, in one piece; rows that see nothing are 0 and -inf."""
    scores = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~seen, -INF)
    return scores.softmax(-1).nan_to_num(0.0) @ v.double(), scores.logsumexp(-1)


@on_ranks(1)
def test_merge(answer: Answer, group: WatchedGroup) -> None:
    for scale in (1.0, 100.0, 3000.0):
        for lead in ((), (2, 3)):
            case(f"scores of about {scale:g}, out {[*lead, 5, 4]}; some queries see nothing of one set, or of both")
            generator = torch.Generator().manual_seed(1)
            q, k, v = (torch.randn(*lead, n, 4, generator=generator) for n in (5, 9, 9))
            seen = torch.ones(5, 9, dtype=torch.bool)
            seen[0, :3], seen[1, 3:7], seen[2] = False, False, False
            sets = [slice(0, 3), slice(3, 7), slice(7, 9)]
            parts = [
                tuple(x.float() for x in attention(scale * q, k[..., s, :], v[..., s, :], seen[:, s])) for s in sets
            ]
            for first, second in ((0, 1), (1, 0)):
                judge_merged(answer, parts[first], parts[second], parts)
            both = answer.merge(answer.merge(parts[0], parts[1]), parts[2])
            out, lse = attention(scale * q, k, v, seen)
            equal(both[1], lse.float(), "lse of three sets, merged one after the other", rtol=1e-4)
            equal(both[0], out.float(), "out of three sets, merged one after the other", rtol=1e-4, atol=1e-4)
    case("one out holds a NaN")
    spoilt, sound = (torch.tensor([[torch.nan, 1.0]]), torch.zeros(1)), (torch.ones(1, 2), torch.zeros(1))
    out, _ = answer.merge(spoilt, sound)
    advice = "fill only what a set of lse -inf gives, or what went wrong before passes unnoticed"
    require(bool(out[0, 0].isnan()), f"a NaN in one out has become {out[0, 0]:g}: {advice}")


def judge_merged(answer: Answer, one: Any, other: Any, parts: list[Any]) -> None:
    with untouched(out_1=one[0], lse_1=one[1], out_2=other[0], lse_2=other[1]):
        found = answer.merge(one, other)
    require(isinstance(found, tuple) and len(found) == 2, "the result is no pair (out, lse)")
    (a, la), (b, lb) = ((x.double() for x in part) for part in (one, other))
    lse = torch.logaddexp(la, lb)
    shares = [(x - lse).exp().nan_to_num(0.0)[..., None] for x in (la, lb)]
    out = shares[0] * a + shares[1] * b
    blind = la.isneginf() | lb.isneginf()
    large = "exp of a large lse overflows: subtract first"
    for what, x, nothing in (("out", found[0], blind[..., None]), ("lse", found[1], blind)):
        if isinstance(x, Tensor) and bool((nan := x.isnan()).any()):
            subtracted = bool((nan & nothing).any()) and not bool((nan & ~nothing).any())
            raise Wrong(f"{what} is NaN: {'-inf - -inf, where a query sees nothing' if subtracted else large}")
        require(not isinstance(x, Tensor) or not bool(x.isposinf().any()), f"{what} is infinite: {large}")
    alone = "the larger lse alone: exp(lse) of both must be added"
    known = {
        alone: out * (lse - torch.maximum(la, lb)).exp().nan_to_num(0.0)[..., None],
        "the mean of the two outs: a set with larger scores weighs more": (a + b) / 2,
        "each out has the other's weight": shares[1] * a + shares[0] * b,
        "weighted by lse itself, not by exp(lse)": (la[..., None] * a + lb[..., None] * b) / (la + lb)[..., None],
        "the sum of the weighted outs, not divided": a * la.exp()[..., None] + b * lb.exp()[..., None],
        "a query that sees nothing of one set still sees the other": out.masked_fill(blind[..., None], 0),
        "the outs are added up: each is divided by its own sum already": a + b,
    }
    equal(found[0], out.float(), "out", known={k: v.float().nan_to_num() for k, v in known.items()}, rtol=1e-4)
    equal(found[1], lse.float(), "lse", known={alone: torch.maximum(la, lb).float()}, rtol=1e-5)


@on_ranks(1)
def test_zigzag(answer: Answer, group: WatchedGroup) -> None:
    for tokens, ranks in ((8, 2), (6, 1), (24, 4), (42, 7), (1280, 64)):
        case(f"{tokens} tokens, {ranks} ranks")
        found, size = answer.zigzag(tokens, ranks), tokens // ranks // 2
        require(isinstance(found, list) and len(found) == ranks, f"expected a list of {ranks} tensors, one a rank")
        everyone = torch.arange(tokens).view(2 * ranks, size)
        everything = sorted(torch.cat([torch.as_tensor(x).flatten() for x in found]).tolist())
        twice = "some tokens are on two ranks or on none: every position belongs to one rank"
        require(everything == list(range(tokens)), twice)
        work = [int((torch.as_tensor(x) + 1).sum()) for x in found]
        for rank, x in enumerate(found):
            known = {
                "one run each: the last rank then has almost twice the mean work": everyone.view(ranks, -1)[rank],
                "every N-th token: nearly equal work, but not the two chunks asked for": torch.arange(
                    rank, tokens, ranks
                ),
                "chunks r and r + N: the last rank has the most work": everyone[[rank, rank + ranks]].flatten(),
                "the second chunk runs backwards: each goes from its first token to its last": torch.cat(
                    [everyone[rank], everyone[2 * ranks - 1 - rank].flip(0)]
                ),
                "the late chunk stands before the early one": everyone[[2 * ranks - 1 - rank, rank]].flatten(),
            }
            expected = everyone[[rank, 2 * ranks - 1 - rank]].flatten()
            equal(x, expected, f"rank {rank}'s positions", known={k: t for k, t in known.items() if ranks > 1})
        require(len(set(work)) == 1, f"the ranks look at {work} keys: not the same work")
    for tokens, ranks in ((10, 2), (6, 2), (9, 1), (4, 4)):
        case(f"{tokens} tokens, {ranks} ranks: {2 * ranks} equal chunks cannot be, a ValueError is expected")
        try:
            found = answer.zigzag(tokens, ranks)
        except ValueError:
            continue
        raise Wrong(f"{tokens} tokens do not make {2 * ranks} equal chunks: a ValueError is expected", f"  {found}")


@on_ranks(1)
def test_context_batch(answer: Answer, group: WatchedGroup) -> None:
    tokens = torch.arange(10, 26).view(2, 8)
    tokens[0, 1] = 0  # a token like any other
    for positions in ([0, 3], [0, 1, 6, 7], [2, 3, 4, 5], [7], [5, -1, 7, -1], [-1], []):
        case(f"sequences of 8, positions {positions}")
        at = torch.tensor(positions, dtype=torch.int64)
        with untouched(tokens=tokens, positions=at):
            found = answer.context_batch(tokens, at)
        require(isinstance(found, tuple) and len(found) == 2, "the result is no pair (inputs, targets)")
        padding = at < 0
        inputs = torch.where(padding, 0, tokens[:, at])
        targets = torch.where(padding | (at == 7), IGNORED, tokens[:, (at + 1) % 8])
        given = [x if isinstance(x, Tensor) and x.shape == inputs.shape else inputs for x in found]
        known = {
            "padding is the sequence's last token: index -1 counts from the end": tokens[:, at],
            "at padding it is 0": torch.where(padding, given[0], inputs),
        }
        equal(found[0], inputs, "inputs", known=known)
        cut = torch.cat([inputs[:, 1:], torch.full_like(inputs[:, :1], IGNORED)], 1)
        known = {
            "the sequence's last token is its own target: it has none": tokens[:, (at + 1).clamp(max=7)].masked_fill(
                padding, IGNORED
            ),
            "shifted after cutting: the token that follows is on another rank, or elsewhere in this one's": cut,
            "token 0 has no target: it is a token like any other, position -1 is padding": torch.where(
                inputs == 0, IGNORED, targets
            ),
            "the targets are the inputs: nothing is shifted": inputs,
            "the sequence's last token has no target, and yet there is one": torch.where(at == 7, given[1], targets),
            "padding has a target: it must not count in the loss": torch.where(padding, given[1], targets),
            "a token has none, and another follows it: in the sequence, if not on this rank": torch.where(
                given[1] == IGNORED, IGNORED, targets
            ),
        }
        equal(found[1], targets, "targets", known={k: t for k, t in known.items() if not torch.equal(t, targets)})
