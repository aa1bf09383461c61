"""The three 1-bit optimizers in one process that plays all ranks, as the papers write them; no class of refimpl's."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from training import tokens

from refimpl.zero.flat import cut_into_buckets

Named = dict[str, Tensor]
BLOCK = 128


def signs(x: Tensor) -> Tensor:
    """[n] -> the mean magnitude of each block with the signs of x."""
    rows = torch.nn.functional.pad(x.abs(), (0, -len(x) % BLOCK)).view(-1, BLOCK)
    counts = torch.full((len(rows), 1), float(BLOCK))
    counts[-1] = len(x) - BLOCK * (len(rows) - 1)
    scale = (rows.sum(1, keepdim=True) / counts).bfloat16().float().expand(rows.shape).reshape(-1)[: len(x)]
    return torch.where(x >= 0, scale, -scale)


@dataclass
class Errors:
    """Of one bucket: each worker's and the servers', all [n]."""

    workers: list[Tensor]
    server: Tensor


def compressed_mean(xs: list[Tensor], errors: Errors, alive: Tensor) -> Tensor:
    """xs of all ranks [n] -> what every rank receives; both compressions lose what they lose into `errors`."""
    n, ranks = len(xs[0]), len(xs)
    most = -(-n // ranks)
    sizes = [min(most, max(0, n - rank * most)) for rank in range(ranks)]
    sent = []
    for x, error in zip(xs, errors.workers, strict=True):
        y = error + x
        c = torch.cat([signs(chunk) for chunk in y.split(sizes) if len(chunk)])
        error.copy_(torch.where(alive, y - c, 0.0))
        sent.append(c)
    mean = sent[0].clone()
    for c in sent[1:]:
        mean += c
    y = errors.server + mean / ranks
    c = torch.cat([signs(chunk) for chunk in y.split(sizes) if len(chunk)])
    errors.server.copy_(torch.where(alive, y - c, 0.0))
    return torch.where(alive, c, 0.0)


@dataclass
class Play:
    """All ranks of a run: the model's weights are those of the rank whose turn it is."""

    make: Callable[[], nn.Module]
    groups: Callable[[nn.Module], list[dict[str, list[nn.Parameter]]]]
    ranks: int
    bucket_size: int
    micro_batches: int = 1
    errors: list[Errors] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.make()
        group_of = {p: i for i, group in enumerate(self.groups(self.model)) for p in group["params"]}
        self.p = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        name_of = {p: name for name, p in self.p.items()}
        cut = cut_into_buckets(list(self.p.values()), group_of, self.bucket_size)
        self.buckets = [[name_of[p] for p in bucket] for bucket in cut]
        self.forget()

    def forget(self) -> None:
        sizes = [sum(self.p[name].numel() for name in bucket) for bucket in self.buckets]
        self.errors = [Errors([torch.zeros(n) for _ in range(self.ranks)], torch.zeros(n)) for n in sizes]

    def gradients(self, step: int, weights: list[Named] | None = None) -> list[Named]:
        """Each rank's own, without what no rank uses."""
        out = []
        for rank in range(self.ranks):
            if weights is not None:
                self.put(weights[rank])
            self.model.zero_grad()
            for a in range(self.micro_batches):
                (self.model(tokens(step, a * self.ranks + rank)) / self.micro_batches).backward()
            out.append({name: p.grad.clone() for name, p in self.p.items() if p.grad is not None})
        return out

    @torch.no_grad()
    def put(self, weights: Named) -> None:
        for name, p in self.p.items():
            p.copy_(weights[name])

    def weights(self) -> Named:
        return {name: p.detach().clone() for name, p in self.p.items()}

    def mean(self, values: list[Named], variance: Named) -> Named:
        """Compressed, bucket by bucket; what has no variance stays 0, what is not there keeps its errors."""
        out: Named = {}
        for bucket, errors in zip(self.buckets, self.errors, strict=True):
            there = [name in values[0] for name in bucket]
            flats = [
                torch.cat([
                    torch.where(variance[n] == 0, 0.0, v[n]).reshape(-1) if n in v else torch.zeros(self.p[n].numel())
                    for n in bucket
                ])
                for v in values
            ]  # fmt: skip
            alive = torch.cat([
                (variance[n] != 0).reshape(-1) if n in variance else torch.zeros(self.p[n].numel(), dtype=torch.bool)
                for n in bucket
            ])  # fmt: skip
            assert any(there)
            received = compressed_mean(flats, errors, alive).split([self.p[n].numel() for n in bucket])
            out |= {n: part.view(self.p[n].shape) for n, part in zip(bucket, received, strict=True) if n in values[0]}
        return out


def mean(values: list[Named]) -> Named:
    """In full precision, in rank order."""
    out = {}
    for name in values[0]:
        total = values[0][name].clone()
        for other in values[1:]:
            total += other[name]
        out[name] = total / len(values)
    return out


def one_bit_adam(play: Play, steps: int, freeze: int, lr: float, decay: float, corrected: bool) -> Named:
    """arXiv:2102.02888, algorithm 1; or with Adam's bias correction, of the variance as it was frozen."""
    w, m, v = play.weights(), dict[str, Tensor](), dict[str, Tensor]()
    for step in range(steps):
        gs = play.gradients(step, [w] * play.ranks)
        zero = {n: torch.zeros_like(g) for n, g in gs[0].items()}
        m, v = m or dict(zero), v or dict(zero)
        if step < freeze:
            g = mean(gs)
            m = {n: m[n] * 0.9 + 0.1 * g[n] for n in g}
            v = {n: v[n] * 0.999 + 0.001 * g[n] * g[n] for n in g}
        else:
            m = play.mean([{n: m[n] * 0.9 + 0.1 * g[n] for n in g} for g in gs], v)
        first = 1 - 0.9 ** (step + 1) if corrected else 1.0
        second = 1 - 0.999 ** min(step + 1, freeze) if corrected else 1.0
        for n in m:
            w[n] = w[n] - lr * (m[n] / first / ((v[n] / second).sqrt() + 1e-8) + decay * w[n])
    return w


def zero_one_adam(play: Play, steps: int, freeze: int, kappa: int, scaler: int, most: int, lr: float) -> Named:
    """arXiv:2202.06009, algorithm 1, with DeepSpeed's policies of when to talk."""
    w, m, v = play.weights(), dict[str, Tensor](), dict[str, Tensor]()
    interval, seen, local, counter = 1, 0, 1, 0
    ws: list[Named] = []
    ms: list[Named] = []
    u: list[Named] = []
    rates = 0.0
    for t in range(1, steps + 1):
        gs = play.gradients(t - 1, ws or [w] * play.ranks)
        zero = {n: torch.zeros_like(g) for n, g in gs[0].items()}
        m, v = m or dict(zero), v or dict(zero)
        if t <= freeze:
            exact = t % interval == 0
            g = mean(gs) if exact else play.mean(gs, v)
            m = {n: m[n] * 0.9 + 0.1 * g[n] for n in g}
            if exact:
                v = {n: v[n] * 0.999 + 0.001 * g[n] * g[n] for n in g}
                seen += 1
                if seen == kappa:
                    seen, interval = 0, 2 * interval
            for n in m:
                w[n] = w[n] - lr * m[n] / (v[n].sqrt() + 1e-8)
            if t == freeze:
                play.forget()
            continue
        if not ws:
            ws, ms = [dict(w) for _ in gs], [dict(m) for _ in gs]
            u = [dict(zero) for _ in gs]
        rates += lr
        for r, g in enumerate(gs):
            for n in g:
                ms[r][n] = ms[r][n] * 0.9 + 0.1 * torch.where(v[n] == 0, 0.0, g[n])
                d = lr * ms[r][n] / (v[n].sqrt() + 1e-8)
                ws[r][n], u[r][n] = ws[r][n] - d, u[r][n] + d
        if t % local == 0:
            c = play.mean([{n: one[n] * (v[n].sqrt() + 1e-8) for n in one} for one in u], v)
            for n in c:
                w[n] = w[n] - c[n] / (v[n].sqrt() + 1e-8)
            m = {n: c[n] / rates for n in c}
            ws, ms, rates = [], [], 0.0
        counter += 1
        if counter == scaler:
            counter, local = 0, min(most, 2 * local)
    return ws[0] if ws else w


def one_bit_lamb(play: Play, steps: int, freeze: int, lr: float, decay: float, top: float) -> Named:
    """arXiv:2104.06069, algorithm 1."""
    w, m, v, fresh = play.weights(), dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    c, s, last = dict[str, float](), dict[str, float](), dict[str, float]()
    for step in range(steps):
        gs = play.gradients(step, [w] * play.ranks)
        zero = {n: torch.zeros_like(g) for n, g in gs[0].items()}
        m, v = m or dict(zero), v or dict(zero)
        if step < freeze:
            g = mean(gs)
            m = {n: m[n] * 0.9 + 0.1 * g[n] for n in g}
            v = {n: v[n] * 0.999 + 0.001 * g[n] * g[n] for n in g}
            for n in g:
                update = m[n] / (v[n].sqrt() + 1e-8) + decay * w[n]
                ratio = 1.0
                if w[n].any() and update.any():
                    ratio = min(max((w[n].double().norm() / update.double().norm()).item(), 0.01), top)
                if ratio != 1:
                    c[n] = 0.9 * c.get(n, 0.0) + 0.1 * ratio
                w[n] = w[n] - lr * ratio * update
            if step == freeze - 1:
                fresh = dict(v)
                roots = {n: m[n].double().norm().item() / math.sqrt(m[n].numel()) for n in m}
                s = {n: sum(roots.values()) / len(roots) / root for n, root in roots.items()}
            continue
        before = m
        received = play.mean([{n: (m[n] * 0.9 + 0.1 * g[n]) * s[n] for n in g} for g in gs], v)
        m = {n: received[n] / s[n] for n in received}
        for n in m:
            g_n = (m[n] - 0.9 * before[n]) / (1 - 0.9)
            fresh[n] = 0.999 * fresh[n] + 0.001 * g_n * g_n
            root, fresh_root = v[n].sqrt() + 1e-8, fresh[n].sqrt() + 1e-8
            update = m[n] / root + decay * w[n]
            factor = (root / fresh_root).max().item()
            if decay:
                share = min(1.0, ((m[n] / root).double().norm() / update.double().norm()).item())
                factor = factor * share + 1 - share
            factor = min(max(factor, 0.5), 4.0)
            factor = min(max(factor, 0.9 * last.get(n, 1.0)), 1.1 * last.get(n, 1.0))
            last[n] = factor
            w[n] = w[n] - lr * c.get(n, 0.0) * factor * update
    return w
