"""The optimizer's parameters: slices of this rank's fp32 memory, as few and as long as the truth allows.

One slice a bucket is enough while all of its parameters have the same history, and one long slice is updated faster
than many short ones. When a parameter stays without a gradient on every rank, torch leaves it alone, and its moments
and count of steps fall behind its neighbours': its slice is then cut at its borders, once and for good. The pieces are
views of the same memory, so nothing moves.

Masters of low precision are cut before a parameter where a slice would else be longer than 4M elements. The gradient of
each slice is widened into memory of its own, and up to 32 MB glibc keeps what is freed for the next step; a larger
block is faulted in anew, which takes ten times as long.

An optimizer that is not element-wise needs whole parameters (see `Kind`): where every rank has them all (DDP) it gets
one slice a parameter, in the parameter's shape. One that asks for what it needs of whole parameters (LAMB: norms; Muon:
the step of a matrix) gets in a shard what the shard has of each, and an answer by `WholeSquares` or `WholeMatrices`.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn, optim

from refimpl.zero.agreement.settings import Settings, settings
from refimpl.zero.flat import ALIGN, ALIGN_PARAMETER, Bucket, round_up
from refimpl.zero.optimizer.by_part import ByPart, Given
from refimpl.zero.optimizer.counted import clear_states, states
from refimpl.zero.optimizer.kind import Kind
from refimpl.zero.parameter import DATA, GRAD

LONGEST = 1 << 22  # elements of a slice whose gradient is widened: 16 MB


class SliceParameter(nn.Parameter):
    """What the optimizer knows. Between backward and step its `grad` shows what the stage holds: see `GradientView`."""

    shows: Callable[[], Tensor | None] | None = None

    @property
    def grad(self) -> Tensor | None:
        own: Tensor | None = GRAD.__get__(self)
        return self.shows() if own is None and self.shows is not None else own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        GRAD.__set__(self, value)


@dataclass
class Slice:
    """Elements start to end of a bucket's owned memory; `param` is a view of them that the optimizer knows."""

    start: int
    end: int
    param: SliceParameter
    whole: nn.Parameter | None = None  # of which it is all that is here, for an optimizer that wants norms


class Slices(ByPart):
    """Keeps `optimizer` pointed at slices of the buckets' masters, and its state with them."""

    def __init__(self, optimizer: optim.Optimizer | None, allow_untested: bool = False) -> None:
        """ValueError if the optimizer has already taken steps. None: nothing to update."""
        super().__init__(optimizer)
        self.kind = Kind(optimizer, allow_untested)
        self.of: dict[Bucket, list[Slice]] = {}
        self.length: dict[Bucket, int] = {}  # of what is owned
        self.gradient_of: Callable[[nn.Parameter, Bucket, int, int], Tensor | None] | None = None  # see `GradientView`
        self.apart: set[nn.Parameter] = set()  # were once left alone, and have borders of their own since
        given = optimizer.param_groups if optimizer else ()
        self._place: dict[Any, int] = {p: i for group in given for i, p in enumerate(group["params"])}
        made = optimizer.state if optimizer else {}
        self._told = {p: {k: v for k, v in made.get(p, {}).items() if not isinstance(v, Tensor)} for p in self._place}
        self._applying = False  # from `hand_out` to `release_gradients`: then a slice's grad is what it was handed
        if optimizer is None:
            return
        clear_states(optimizer)
        for group in optimizer.param_groups:
            group["params"].clear()  # in place: LBFGS holds on to the list

    def add(self, masters: dict[Bucket, Tensor], most: int | None = None) -> None:
        """Slices for these buckets, in the optimizer's groups that the buckets name; each has `most` elements.

        TypeError if sharding these parameters would change what the optimizer computes.
        """
        fresh: dict[int, list[SliceParameter]] = {}
        for bucket, master in masters.items():
            self.length[bucket] = master.numel()
            self.of[bucket] = self._first(bucket, master, most)
            fresh.setdefault(bucket.group_index, []).extend(s.param for s in self.of[bucket])
        assert self.optimizer is not None or not masters
        for index, params in fresh.items():
            self._enlist(index, params)

    def _first(self, bucket: Bucket, master: Tensor, most: int | None) -> list[Slice]:
        if self.kind.elementwise:
            inner = self._borders(bucket) if bucket.dtype != master.dtype else []
            cuts = [0, *(inner if most is None else range(most, master.numel(), most)), master.numel()]
            return [self._slice(bucket, a, b, master[a:b]) for a, b in pairwise(cuts)]
        if master.numel() == bucket.padded:
            ends = [(at, at + p.numel(), p) for p, at in bucket.offset.items()]
            return [self._slice(bucket, a, b, bucket.piece(master, p), p) for a, b, p in ends]
        self.kind.refuse_shard()
        spans = [(*bucket.span(p), p) for p in bucket.params]
        return [self._slice(bucket, a, b, master[a:b], p) for a, b, p in spans if a < b]

    def _borders(self, bucket: Bucket) -> list[int]:
        """Where to cut a long master: before parameters, where ALIGN allows it, so that the bits stay the same."""
        cuts, end = [0], self.length[bucket]
        begins = [self.span(bucket, p)[0] for p in bucket.params]
        for begin, following in pairwise(sorted(b for b in (*begins, end) if b % ALIGN == 0)):
            if begin > cuts[-1] and following - cuts[-1] > LONGEST:
                cuts.append(begin)
        return [cut for cut in cuts[1:] if cut < end]

    def _slice(self, bucket: Bucket, start: int, end: int, memory: Tensor, whole: nn.Parameter | None = None) -> Slice:
        param = SliceParameter(memory)  # it requires a gradient: some optimizers look
        this = weakref.ref(param)  # no cycle: it must go when it is cut in two

        def shows() -> Tensor | None:
            p = this()
            if self._applying or self.gradient_of is None or p is None:
                return None
            return self.gradient_of(p, bucket, start, end)

        param.shows = shows
        return Slice(start, end, param, whole)

    def _enlist(self, index: int, params: list[SliceParameter]) -> None:
        """Add params to the optimizer's group.

        Where state is made by the constructor (Adagrad), a new one makes it. What the first one noted of a whole
        parameter beside tensors (APOLLO's seeds, which count all groups' parameters) stays as it was; where that is
        all, none is made: LLaMA-Factory's Muon, which takes its rate first, notes which parameters are its own.
        """
        assert self.optimizer is not None
        group = self.optimizer.param_groups[index]
        group["params"] += params
        whole = {id(s.param): s.whole for slices in self.of.values() for s in slices}
        if not self.kind.asks_once:  # it may go by their places, as they were given
            group["params"].sort(key=lambda p: self._place.get(whole[id(p)], len(self._place)))
        if self.kind.born_with_state:
            noted = {p: self._told.get(whole[id(p)], {}) for p in params}
            known = all(noted.values()) and not self.kind.born_with_tensors
            made = {} if known else self.kind.twin(self.optimizer, index, params).state
            self.optimizer.state.update({p: made.get(p, {}) | noted[p] for p in params})

    def hand_out(
        self, bucket: Bucket, grad: Tensor, factor: float, left_alone: set[nn.Parameter], start: int, end: int
    ) -> None:
        """factor * grad, the elements start to end, to the slices there; those to leave alone get none.

        fp32 is multiplied in place.
        """
        self._applying = True
        self.apart |= left_alone
        spans = [self.set_apart(bucket, p) for p in left_alone.intersection(bucket.params)] if left_alone else []
        for s in self.of[bucket]:
            if s.start < start or s.end > end:
                continue
            alone = any(a <= s.start < s.end <= b for a, b in spans)
            if alone:
                s.param.grad = None
                continue
            wide = grad[s.start - start : s.end - start].to(s.param.device, s.param.dtype)
            s.param.grad = (wide if factor == 1 else wide.mul_(factor)).view(s.param.shape)

    def span(self, bucket: Bucket, p: nn.Parameter) -> tuple[int, int]:
        """Where p lies in the bucket's master."""
        return bucket.within(self.length[bucket], p)

    def cut(self, bucket: Bucket, at: int) -> None:
        """Cut the slice that has `at` inside, with its state, in two."""
        slices, optimizer = self.of[bucket], self.optimizer
        assert optimizer is not None
        i = next((i for i, s in enumerate(slices) if s.start < at < s.end), None)
        if i is None:
            return
        old = slices[i]
        memory = DATA.__get__(old.param)  # [old.end - old.start]
        halves = ((old.start, at), (at, old.end))
        pieces = [self._slice(bucket, a, b, memory[a - old.start : b - old.start]) for a, b in halves]
        state = optimizer.state.pop(old.param, {})
        for new in pieces:
            inside = slice(new.start - old.start, new.end - old.start)
            if state:
                optimizer.state[new.param] = {
                    key: (value[inside] if value.shape == old.param.shape else value.clone())
                    if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }  # fmt: skip
        slices[i : i + 1] = pieces
        params = optimizer.param_groups[bucket.group_index]["params"]
        j = next(j for j, p in enumerate(params) if p is old.param)
        params[j : j + 1] = [new.param for new in pieces]

    def set_apart(self, bucket: Bucket, p: nn.Parameter) -> tuple[int, int]:
        """Cut at p's borders, as for a parameter that was left alone. -> where they are

        The padding behind p goes with it: a slice that ended inside a vector would have its last elements computed one
        by one, which rounds otherwise, and other ones on a shard than on the whole.
        """
        start, end = self.span(bucket, p)
        borders = start, min(round_up(end, ALIGN_PARAMETER), self.length[bucket])
        for at in borders:
            self.cut(bucket, at)
        return borders

    def inside(self, bucket: Bucket, start: int, end: int) -> list[Slice]:
        """The slices that lie there."""
        return [s for s in self.of[bucket] if start <= s.start and s.end <= end]

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """The optimizer's own step, not the stage's."""
        assert self.optimizer is not None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a torch schedule looks for
        return self.kind.cls.step(self.optimizer, closure) if closure else self.kind.cls.step(self.optimizer)

    def step_inside(self, bucket: Bucket, start: int, end: int, settings: Given) -> None:
        """The optimizer's own step, of the slices there alone, with these settings. Its step hooks run each time."""
        assert self.optimizer is not None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a torch schedule looks for
        self.do_inside(bucket, start, end, settings, self.kind.cls.step)

    def do_inside(self, bucket: Bucket, start: int, end: int, settings: Given, do: Callable[[Any], object]) -> None:
        """do(optimizer), as if it had the slices there alone, and these settings."""
        self.do_with({bucket.group_index: [s.param for s in self.inside(bucket, start, end)]}, settings, do)

    def settings_in_words(self) -> Settings:
        """The same, as far as it must be equal on all ranks; without waiting for a GPU."""
        return settings(self.optimizer, self.kind.cls, waits=False)

    def regrouped(self) -> list[int]:
        """The optimizer's groups whose parameters are not the slices that were put there."""
        assert self.optimizer is not None
        here = {i: sorted(map(id, group["params"])) for i, group in enumerate(self.optimizer.param_groups)}
        mine: dict[int, list[int]] = {}
        for bucket, slices in self.of.items():
            mine.setdefault(bucket.group_index, []).extend(id(s.param) for s in slices)
        return [i for i in sorted({*here, *mine}) if here.get(i, []) != sorted(mine.get(i, []))]

    def tensors(self, s: Slice) -> dict[str, Tensor]:
        """A slice's own memory, under "", and its state of that shape, by key; not a number's count of steps."""
        state = self.optimizer.state.get(s.param, {}) if self.optimizer else {}
        same = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == s.param.shape and k != "step"}
        return {"": s.param, **same}

    def release_gradients(self, *buckets: Bucket) -> None:
        """Of these buckets, or of all."""
        self._applying = False
        for bucket in buckets or self.of:
            for s in self.of[bucket]:
                s.param.grad = None

    def restore(self, group_of: dict[nn.Parameter, int]) -> None:
        """Point the optimizer at the model's own parameters again, without state."""
        if self.optimizer is not None:
            for hook in ("whole_squares", "whole_matrices", "exchange"):
                vars(self.optimizer).pop(hook, None)
            clear_states(self.optimizer)
            for i, group in enumerate(self.optimizer.param_groups):
                group["params"][:] = [p for p, index in group_of.items() if index == i]

    def state_part(self, bucket: Bucket, p: nn.Parameter, key: str) -> Tensor | None:
        """This rank's part of p's state `key`, flat; None if the optimizer has none (yet).

        What is not cut (a count of steps) is None where this rank has nothing of p: the slice there is a neighbour's.
        """
        start, end = self.span(bucket, p)
        for s in self.of.get(bucket, []):
            value = self.optimizer.state.get(s.param, {}).get(key) if self.optimizer else None
            if not isinstance(value, Tensor):
                continue
            if value.shape == s.param.shape and s.start <= start and end <= s.end:
                return value.view(-1)[start - s.start : end - s.start]
            if value.shape != s.param.shape and s.start <= start < min(s.end, end):
                return value
        return None

    def state(self) -> list[Tensor]:
        """The optimizer's own tensors."""
        if self.optimizer is None:
            return []
        return [t for state in states(self.optimizer) for t in state.values() if isinstance(t, Tensor)]

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and where its slices are cut."""
        if self.optimizer is None:
            return {}
        cuts = [[s.start for s in slices[1:]] for slices in self.of.values()]
        return {"cuts": cuts, **optim.Optimizer.state_dict(self.optimizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, over the same buckets."""
        if self.optimizer is None:
            return
        for bucket, cuts in zip(self.of, state["cuts"], strict=True):
            for at in cuts:
                self.cut(bucket, at)
            if len(self.of[bucket][1:]) != len(cuts):
                raise ValueError(
                    "this optimizer state was saved from other slices: offload_ratio, sub_group_size or the home "
                    "differ; a checkpoint of the engine goes from any to any"
                )
        self.kind.cls.load_state_dict(self.optimizer, {k: v for k, v in state.items() if k != "cuts"})
