"""What must be alike on all ranks: asked with the norm of every step, before anything is updated.

    settings   the optimizer's, and that checksum: see `settings.py`
    writes     to parameters, in place, since the last step: their version counters, as autograd has them. Where they
               differ the weights are compared: to load on one rank, and to send what was loaded by hand, is right
    weights    where every rank updates all (DDP), at the 1st, 2nd, 4th, 8th, ... step: of a mixture nothing ever fails

It is one checksum, and no byte more travels. Left out: weights on a GPU, for which the host would wait, and what is
written past autograd: `p.data.copy_`, and a rank's own part (DeepSpeed's `safe_set_local_fp32_param`, which is right).
"""

import zlib
from collections.abc import Mapping
from operator import sub
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from refimpl.zero.parameter import DATA, Freed
from refimpl.zero.settings import Settings, difference

if TYPE_CHECKING:
    from refimpl.comm.group import Group
    from refimpl.zero.stage import Stage

T = TypeVar("T")
WRITES = ("parameters", "writes in place since the last step")
REMEDY = "Set, load and change alike on every rank; a schedule that follows the loss needs its mean over all ranks"


class Alike:
    """Compares what `stage` has on its ranks."""

    def __init__(self, stage: "Stage") -> None:
        self.stage = stage
        self.params = [p for p in stage.names if stage.experts.get(p, stage.group) is stage.group]
        self.before = self.now = self._versions()

    @property
    def frozen(self) -> set[nn.Parameter]:
        """What this rank has no gradient of for that reason."""
        return self.stage.gradients.frozen or set()

    def words(self) -> Settings:
        """What this rank says of itself."""
        update, self.now = self.stage.update, self._versions()
        given = {WRITES: str(hash(self._writes())), **update.slices.settings_in_words()}
        replicated = update.replicated() and self.stage.group.size > 1
        if replicated and not self.stage.config.delayed_update:  # which may be under way
            given |= self._replicas(update.steps)
        return given

    def agreed(self) -> None:
        """All ranks have said the same."""
        self.before = self.now

    def _versions(self) -> list[int]:
        return [0 if isinstance(p, Freed) else p._version for p in self.params]

    def _writes(self) -> tuple[int, ...]:
        return tuple(map(sub, self.now, self.before))

    def _replicas(self, step: int) -> Settings:
        buckets = [b for b in self.stage.buckets if b.group is self.stage.group and b.full.is_cpu]
        if not buckets or step & (step - 1):
            return {}
        return {("the weights'", "checksum"): str(sum(int(b.full.view(torch.int64).sum()) for b in buckets))}

    def _weights(self) -> Settings:
        """Of all parameters that are whole here, trained or not."""
        whole = {self.stage.names[p]: DATA.__get__(p) for p in self.params if not isinstance(p, Freed)}
        words = {name: t.cpu().contiguous().view(-1).view(torch.uint8).numpy() for name, t in whole.items()}
        return {(name, "checksum"): str(zlib.crc32(those)) for name, those in words.items()}

    def refuse_parted(self, given: Settings) -> None:
        """The sums have said that some ranks' words differ. ValueError on every rank if they may not. A collective."""
        group = self.stage.group
        said = self._said(given, group)
        if all_same(said):
            return
        if not all_same({rank: words[WRITES] for rank, words in said.items()}) and (
            not all_same(self._said(self._weights(), group))
        ):
            raise ValueError(f"{self._step()}: {self._written()}; nothing is updated. {REMEDY}")
        settings = {rank: {k: v for k, v in words.items() if k != WRITES} for rank, words in said.items()}
        if not all_same(settings):
            raise ValueError(f"{self._step()}: {difference(settings)}; nothing is updated. {REMEDY}")

    def _written(self) -> str:
        """Which parameters were written more often on some ranks than on others, and there. A collective."""
        times = self._said(self._writes(), self.stage.group)
        least = [min(those) for those in zip(*times.values(), strict=True)]
        where = []
        for rank, those in times.items():
            names = [self.stage.names[p] for p, n, m in zip(self.params, those, least, strict=True) if n > m]
            where += [f"rank {rank}: {', '.join(names)}"] if names else []
        return (
            f"weights were written in place (by load_state_dict, copy_, init) on some ranks alone: {'; '.join(where)}"
        )

    def refuse_frozen(self, parted: set[nn.Parameter], group: "Group") -> None:
        """ValueError on every rank of `group`: see `missed.py`. A collective."""
        here = self.frozen.intersection(parted)
        said = self._said([name for p, name in self.stage.names.items() if p in here], group)
        if not all_same(said):
            where = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in said.items() if names)
            raise ValueError(
                f"{self._step()}: frozen (requires_grad = False) while other ranks have a gradient: {where}. In the "
                "mean it would count as zero there; nothing is updated. Freeze and unfreeze alike on every rank"
            )

    def _step(self) -> str:
        return f"{type(self.stage).__name__}, step {self.stage.update.steps}"

    def _said(self, given: T, group: "Group") -> dict[int, T]:
        """What each rank says. A collective."""
        across = self.stage.update.across
        of_ranks = dict(zip(group.ranks, group.all_gather_object(given), strict=True))
        for others in across.all_gather_object(of_ranks) if across is not None else ():
            of_ranks |= others
        return of_ranks


def all_same(said: Mapping[int, Any]) -> bool:
    """Also where ranks are only pretended, which all say the same."""
    first, *others = said.values()
    return all(other == first for other in others)
