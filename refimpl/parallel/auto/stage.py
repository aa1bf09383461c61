"""Where cuts are tried: the twin, what it does whole, and the ranks' verdicts.

Every rank plays its part alone; then one exchange of words and, if nobody complains, one all-reduce of all summands.
"""

import re
import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from refimpl.comm.group import Group
from refimpl.parallel.auto import rehearsal
from refimpl.parallel.auto.cut import Cut
from refimpl.parallel.auto.regions import Region, pattern
from refimpl.parallel.auto.rehearsal import Notes, whole_run
from refimpl.parallel.auto.sizes import Attribute, choices, get, keywords
from refimpl.parallel.auto.trace import Call
from refimpl.parallel.split import Split


def alike_regions(regions: Iterable[Region]) -> list[list[Region]]:
    """Regions that are the same but for their number in a list of layers."""
    found: dict[tuple[Any, ...], list[Region]] = {}
    for region in regions:
        found.setdefault(tuple((pattern(name), style) for name, style in region.styles.items()), []).append(region)
    return list(found.values())


class Stage:
    """Where cuts are tried: the twin, and what it does whole."""

    def __init__(self, twin: nn.Module, call: Call, group: Group) -> None:
        self.twin, self.call, self.group = twin, call, group
        self.whole = {learning: whole_run(twin, call, learning) for learning in (True, False)}
        with rehearsal.seeded(None), torch.no_grad():
            self.given = keywords(twin, call)

    def best(self, alike: list[Region]) -> Cut | str:
        """The cut of these regions with the first set of attributes that lets it pass, or why none does."""
        reasons = list[str]()
        for chosen in choices(self.twin, alike[0], self.given):
            cut = Cut({name: style for region in alike for name, style in region.styles.items()})
            for region in alike:
                cut.sizes |= self.sizes(region, chosen)
            verdict = self.rehearse(cut)
            if not isinstance(verdict, str):
                cut.summed = verdict
                return self.fewer(cut)
            divided = ", ".join(attribute for attribute, _, _ in chosen)
            reasons.append(verdict + (f" ({divided} divided)" if chosen else ""))
        return reasons[min(1, len(reasons) - 1)]

    def fewer(self, cut: Cut) -> Cut:
        """Without the attributes that need not be divided."""
        for attribute in sorted({attribute for _, attribute in cut.sizes}):
            less = Cut(cut.styles, {key: split for key, split in cut.sizes.items() if key[1] != attribute}, cut.summed)
            if not isinstance(self.rehearse(less), str):
                cut = less
        return cut

    def sizes(self, region: Region, chosen: tuple[Attribute, ...]) -> dict[tuple[str, str], Split]:
        return {
            (name, attribute): split
            for name in region.around
            for attribute, value, split in chosen
            if same(self.value(name, attribute), value)
        }

    def value(self, name: str, attribute: str) -> Any:
        if attribute.endswith("="):
            return self.given.get(name, {}).get(attribute[:-1])
        return get(self.twin.get_submodule(name), attribute)

    def rehearse(self, cut: Cut) -> list[str] | str:
        """A collective. Whole parameters whose gradients must be summed, or the first rank's word on what is wrong."""
        parts = [(Notes(), self.whole[learning]) for learning in (True, False)]
        wrong, partial = list[str](), list[str]()
        for (part, _), learning in zip(parts, (True, False), strict=True):
            if not wrong:
                wrong, names = self.alone(cut, part, learning)
                partial += names
        verdicts = self.group.all_gather_object((wrong, partial, [sorted(part.outs) for part, _ in parts]))
        if reasons := [words[0] for words, _, _ in verdicts if words]:
            return str(reasons[0])
        if any(outs != verdicts[0][2] for _, _, outs in verdicts):
            return "its ranks call different layers"
        summed = sorted({name for _, names, _ in verdicts for name in names})
        return rehearsal.sums_differ(parts, summed, self.group) or summed

    def alone(self, cut: Cut, part: Notes, learning: bool) -> tuple[list[str], list[str]]:
        """This rank's part, without a word to the others: (what is wrong, parameters with a part of a gradient)."""
        try:
            undo = cut.apply(self.twin, self.group)
        except (ValueError, TypeError) as error:
            return [str(error)], []
        try:
            rehearsal.stand_in(self.twin, self.whole[learning], part)
            rehearsal.play(self.twin, self.call, part, learning)
            return rehearsal.differences(self.twin, self.whole[learning], part, self.group)
        except Exception as error:  # whatever a model does with a part of what it expects
            return [f"its forward does not fit a part, write -1 for what is cut: {last_line(error)}"], []
        finally:
            undo()


def same(found: Any, value: Any) -> bool:
    return (tuple(found) if isinstance(found, list) else found) == value and type(found) is not bool


def last_line(error: Exception) -> str:
    """Where the model's own code stands, and what went wrong there."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not re.search(r"/(torch|refimpl)/", f.filename)]
    where = f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}: {own[-1].line}: " if own else ""
    return f"{where}{str(error).splitlines()[0] if str(error) else type(error).__name__}"
