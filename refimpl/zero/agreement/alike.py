"""What must be alike on all ranks: asked with the norm of every step, before anything is updated.

    settings   the optimizer's, and that checksum: see `settings.py`
    writes     to parameters that are whole here, in place (`p.data.copy_` too), since the last step: their version
               counters, and at the 1st, 2nd, 4th, 8th, ... step with any the values. Where they differ the weights are
               compared: to load on one rank, and to send what was loaded by hand, is right
    gradients  of which every rank has the mean (DDP): how often they were written (`p.grad = ...`, `p.grad.mul_`) since
               they arrived; where that differs they are compared
    freezing   in the middle of an accumulation: what was frozen in some backwards since the last step, and in how many
    groups     of the optimizer: their parameters must be the slices that the stage has put there, on any rank
    twice      in a backward: what checkpoint(use_reentrant=True) and the model itself have both used is reduced twice,
               behind all others, and two such buckets of one length would be added to each other
    later      what is trained since the stage was built, thawed or of a new group: it travels by its length alone
    hooks      of the user's, in backward: what they write, see `refuse_hooked`, is told by each rank for itself
    updates    the steps in which the optimizer, or a hook of its step, raised: there a script may have caught it
    weights    where every rank updates all (DDP, shards of one rank), at the 1st, 2nd, 4th, 8th, ... step: of a
               mixture nothing ever fails

It is one checksum, and no byte more travels. Left out: values on a GPU, for which the host would wait, and what is
written to a rank's own part (DeepSpeed's `safe_set_local_fp32_param`), which is right.
"""

import math
import zlib
from collections.abc import Mapping
from operator import sub
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from refimpl.zero.agreement.settings import Settings, difference
from refimpl.zero.flat import Bucket
from refimpl.zero.gather.unit import unit_of
from refimpl.zero.parameter import DATA

if TYPE_CHECKING:
    from refimpl.comm.group import Group
    from refimpl.zero.stage import Stage

T = TypeVar("T")
WRITES = ("parameters", "writes in place since the last step")
GRADIENTS = ("gradients", "writes since backward")
FREEZING = ("parameters", "frozen in some backwards")
COUNTS = (WRITES, GRADIENTS, FREEZING)  # where they differ that may be right
RAISED = ("steps", "raised")
REGROUPED = ("optimizer.param_groups", "parameters replaced in")
TWICE = ("parameters", "whose gradient came twice in a backward,")
LATER = ("parameters", "trained since the stage was built")
REMEDY = "Set, load and change alike on every rank; a schedule that follows the loss needs its mean over all ranks"


class Alike:
    """Compares what `stage` has on its ranks."""

    def __init__(self, stage: "Stage") -> None:
        self.stage = stage
        same = [p for p in stage.names if stage.experts.get(p, stage.group) is stage.group]
        self.params = [p for p in same if unit_of(p) is None]  # a unit looks after its own
        self.at = {p: i for i, p in enumerate(self.params)}
        self.before = self.now = self._versions()
        self.ours = self.trained = (0,) * len(self.params)  # of the versions, what the stage has added
        self.hooked: dict[nn.Parameter, int] = {}  # versions, when backward began
        self.of = self.times = 0  # parameters trained; steps before which something was written in place

    @property
    def frozen(self) -> set[nn.Parameter]:
        """What this rank has no gradient of for that reason."""
        gradients = self.stage.gradients
        return {p for p, times in gradients.frozen_in.items() if times == gradients.passes and p not in gradients.used}

    def _frozen_between(self) -> dict[str, int]:
        """In how many backwards since the step, of what was frozen in some, by name."""
        gradients, names = self.stage.gradients, self.stage.names
        between = gradients.frozen_in.keys() - self.frozen
        return {names[p]: gradients.frozen_in[p] for p in self.params if p in between} if between else {}

    def words(self) -> Settings:
        """What this rank says of itself."""
        update, self.now = self.stage.update, self._versions()
        given = {WRITES: repr(self._written()), FREEZING: repr(self._frozen_between())}
        given |= {RAISED: repr([*update.raised]), REGROUPED: repr(update.slices.regrouped())}
        given[TWICE] = ", ".join(self.stage.gradients.twice) or "none"
        given[LATER] = str(zlib.crc32(repr(self.stage.later).encode()))
        given |= update.slices.settings_in_words()
        several = self.stage.group.size > 1 or update.across is not None
        replicated = update.replicated() and several
        given[GRADIENTS] = str(self._gradients_written() if replicated and update.averaged else 0)
        if replicated and not self.stage.config.delayed_update:  # which may be under way
            given |= self._replicas(update.steps)
        return given

    def agreed(self, given: Settings) -> None:
        """All ranks have said the same, or may differ. ValueError if it is nothing to go on with."""
        self._refuse_regrouped({"every rank": given[REGROUPED]})
        self.before, self.ours = self.now, (0,) * len(self.params)

    def begin_backward(self) -> None:
        """Remember what is about to get a gradient under a hook of the user's, beside the stage's own."""
        self.hooked = {p: p._version for p in self.params if len(p._post_accumulate_grad_hooks or ()) > 1}

    def refuse_hooked(self) -> None:
        """RuntimeError if such a hook has written its parameter: what it sees is this rank's own gradient."""
        written = [self.stage.names[p] for p, before in self.hooked.items() if p._version != before]
        if written:
            raise RuntimeError(
                f"{type(self.stage).__name__}: {', '.join(written)} written in backward, by a hook: an optimizer that "
                "steps there has the gradient of its own rank alone, and the ranks' weights part. Give the stage one "
                "optimizer of all parameters, whose step() comes behind backward; from ZeRO-2 on a rank keeps 1/N of "
                "the gradients till then"
            )

    def _versions(self) -> list[int]:
        versions = [p._version for p in self.params]
        for p, counter in self.stage.shown.items():
            if p in self.at:
                versions[self.at[p]] += counter._version
        return versions

    def stepped(self) -> None:
        """The stage has raised the versions of what it trains, which is no write."""
        trained = self.stage.gradients.bucket_of
        if len(trained) != self.of:
            self.of, self.trained = len(trained), tuple(int(p in trained) for p in self.params)
        self.ours = self.trained

    def _writes(self) -> tuple[int, ...]:
        return tuple(map(sub, self.now, self.before))

    def _written(self) -> tuple[int, Settings]:
        """How often what was written, and what it is now, if it is looked at."""
        writes = self._writes()
        if writes == self.ours:
            return hash(writes), {}
        self.times += 1
        looks = not self.times & (self.times - 1)
        written = [p for p, n, ours in zip(self.params, writes, self.ours, strict=True) if n != ours and p.is_cpu]
        return hash(writes), self._weights(written if looks else [])

    def _replicas(self, step: int) -> Settings:
        update = self.stage.update
        mine = {b for b, w in update.owned.items() if b.group is self.stage.group and w.is_cpu and b.shelf is None}
        if not mine or step & (step - 1):
            return {}
        return {("the weights'", "checksum"): str(sum(int(update.owned[b].view(torch.int64).sum()) for b in mine))}

    def _weights(self, params: list[nn.Parameter]) -> Settings:
        return checksums({self.stage.names[p]: DATA.__get__(p) for p in params})

    def _gradients_written(self) -> int:
        versions = self.stage.gradients.versions
        return sum(t._version - versions[b] for b, t in self._totals())

    def _gradients(self) -> Settings:
        return checksums({self.stage.names[p]: b.piece(t, p) for b, t in self._totals() for p in b.params})

    def _totals(self) -> list[tuple[Bucket, Tensor]]:
        return [(b, t) for b, t in self.stage.gradients.total.items() if b.group is self.stage.group]

    def refuse_parted(self, given: Settings) -> None:
        """The sums have said that some ranks' words differ. ValueError on every rank if they may not. A collective."""
        said = self._said(given, self.stage.group)

        def differ(key: tuple[str, str]) -> bool:
            return not all_same({rank: words[key] for rank, words in said.items()})

        if differ(RAISED):
            raised = raised_alone(self._said(self.stage.update.raised, self.stage.group))
            raise ValueError(f"{self._step()}: {raised}")
        weights = self._said(self._weights(self.params), self.stage.group) if differ(WRITES) else {0: {}}
        if not all_same(weights):
            raise ValueError(f"{self._step()}: {self._who_wrote(weights)}; nothing is updated. {REMEDY}")
        gradients = self._said(self._gradients(), self.stage.group) if differ(GRADIENTS) else {0: {}}
        if not all_same(gradients):
            where = ", ".join(differing(gradients))
            raise ValueError(
                f"{self._step()}: gradients were written on some ranks alone, in {where}; nothing is updated. {REMEDY}"
            )
        if differ(REGROUPED):
            self._refuse_regrouped({f"rank {rank}": words[REGROUPED] for rank, words in said.items()})
        if differ(LATER):
            later = self._said({LATER: ", ".join(self.stage.later)}, self.stage.group)
            raise ValueError(f"{self._step()}: {difference(later)}; nothing is updated. {REMEDY}")
        if differ(TWICE):
            twice = {rank: {TWICE: words[TWICE]} for rank, words in said.items()}
            raise ValueError(
                f"{self._step()}: {difference(twice)}; nothing is updated. Under checkpoint(..., use_reentrant=False) "
                "it comes once, whatever each rank computes"
            )
        if differ(FREEZING):
            self._refuse_frozen_between()
        settings = {rank: {k: v for k, v in w.items() if k not in COUNTS} for rank, w in said.items()}
        if not all_same(settings):
            raise ValueError(f"{self._step()}: {difference(settings)}; nothing is updated. {REMEDY}")

    def _refuse_regrouped(self, groups: Mapping[str, str]) -> None:
        where = "; ".join(f"{rank}: {which}" for rank, which in groups.items() if which != "[]")
        if where:
            raise ValueError(
                f"{self._step()}: the parameters in the optimizer's param_groups were replaced ({where}); the stage "
                "updates its slices, which were there, and nothing is updated. To train less freeze it "
                "(requires_grad_(False)), to train more call optimizer.add_param_group, on every rank"
            )

    def _who_wrote(self, weights: Mapping[int, Settings]) -> str:
        """Which parameters were written more often on some ranks than on others, and there; if none, which differ.

        A collective.
        """
        times = self._said(self._writes(), self.stage.group)
        least = [min(those) for those in zip(*times.values(), strict=True)]
        where = []
        for rank, those in times.items():
            names = [self.stage.names[p] for p, n, m in zip(self.params, those, least, strict=True) if n > m]
            where += [f"rank {rank}: {', '.join(names)}"] if names else []
        what = "weights were written in place (by load_state_dict, copy_, init)"
        if where:
            return f"{what} on some ranks alone: {'; '.join(where)}"
        return f"{what} with other values on different ranks: {', '.join(differing(weights))}"

    def refuse_frozen(self, parted: set[nn.Parameter], group: "Group") -> None:
        """ValueError on every rank of `group`: see `missed.py`. A collective."""
        here = self.frozen.intersection(parted)
        said = self._said([name for p, name in self.stage.names.items() if p in here], group)
        if not all_same(said):
            self._refuse_freezing(said)

    def _refuse_frozen_between(self) -> None:
        """ValueError on every rank if one has frozen a parameter more often than one that has a gradient. A collective.

        Unused there in those backwards is right: an expert, or a branch.
        """
        used = {self.stage.names[p] for p in self.stage.gradients.used}
        said = self._said((self._frozen_between(), used), self.stage.group)

        def least(name: str) -> float:
            return min((frozen.get(name, 0) for frozen, used in said.values() if name in used), default=math.inf)

        parted = {rank: [n for n, times in frozen.items() if times > least(n)] for rank, (frozen, _) in said.items()}
        if any(parted.values()):
            self._refuse_freezing(parted)

    def _refuse_freezing(self, said: Mapping[int, list[str]]) -> None:
        where = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in said.items() if names)
        raise ValueError(
            f"{self._step()}: frozen (requires_grad = False) while other ranks have a gradient: {where}. In the mean "
            "it would count as zero there; nothing is updated. Freeze and unfreeze alike on every rank"
        )

    def _step(self) -> str:
        return f"{type(self.stage).__name__}, step {self.stage.update.steps}"

    def _said(self, given: T, group: "Group") -> dict[int, T]:
        """What each rank says. A collective."""
        across = self.stage.update.across
        of_ranks = dict(zip(group.ranks, group.all_gather_object(given), strict=True))
        for others in across.all_gather_object(of_ranks) if across is not None else ():
            of_ranks |= others
        return dict(sorted(of_ranks.items()))


def raised_alone(said: Mapping[int, Mapping[int, str]]) -> str:
    """What to tell of ranks that have raised in an update, which others have made; "" if all have, or none."""
    if all_same({rank: [*raised] for rank, raised in said.items()}):
        return ""
    alone = [(rank, step, what) for rank, of in said.items() for step, what in of.items()]
    alone = [those for those in alone if not all(those[1] in raised for raised in said.values())]
    where = "; ".join(f"rank {rank}, step {step}: {what}" for rank, step, what in alone)
    return (
        f"the optimizer's step raised on some ranks alone ({where}), so weights and state are of no one step. Load a "
        "checkpoint, on every rank"
    )


def checksums(whole: Mapping[str, Tensor]) -> Settings:
    words = {name: t.cpu().contiguous().view(-1).view(torch.uint8).numpy().data for name, t in whole.items()}
    return {(name, "checksum"): str(zlib.crc32(those)) for name, those in words.items()}


def differing(said: Mapping[int, Settings]) -> list[str]:
    """The names under which ranks say different things."""
    first, *others = said.values()
    return [key[0] for key, value in first.items() if any(words[key] != value for words in others)]


def all_same(said: Mapping[int, Any]) -> bool:
    """Also where ranks are only pretended, which all say the same."""
    first, *others = said.values()
    return all(other == first for other in others)
