"""What became of each layer, as a table: `print(autotp(model, group, example))`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from refimpl.parallel.auto.cut import Cut
from refimpl.parallel.auto.regions import pattern
from refimpl.parallel.auto.trace import Trace, plain_layers, unlike
from refimpl.parallel.styles import Columns, EmbeddingColumns, Rows, Style, Vocabulary

KINDS = {Columns: "columns", EmbeddingColumns: "columns", Rows: "rows", Vocabulary: "vocabulary"}


@dataclass
class Report:
    """What became of each linear layer and embedding. `print` it."""

    cut: Cut
    kinds: dict[str, str]  # layer -> "columns", "rows", "vocabulary", "whole"
    details: dict[str, str]  # layer -> its units, or why it is whole

    @property
    def plan(self) -> dict[str, Style]:
        """For `parallelize`: full names. It divides no attributes."""
        return self.cut.styles

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], int] = {}
        for name, kind in self.kinds.items():
            row = pattern(name), kind, pattern(self.details[name])
            rows[row] = rows.get(row, 0) + 1
        rows |= {(pattern(f"{m}.{a}"), "divided", ""): 0 for m, a in self.cut.sizes}
        rows |= {(pattern(name), "whole", "its gradient is summed"): 0 for name in self.cut.summed}
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(
            f"{name:{width}}  {f'{count} x' if count else '':>5}  {kind:10}  {detail}".rstrip()
            for (name, kind, detail), count in rows.items()
        )


def reasons(model: nn.Module, found: Trace) -> dict[str, str]:
    """Of every layer, and every other matrix: why it stays whole, unless something better is known."""
    plain, why = plain_layers(model), dict[str, str]()
    for name, module in model.named_modules():
        if name not in plain:
            why |= {key: unlike(module, p) for key, p in module.named_parameters(name, recurse=False) if p.dim() > 1}
        elif name not in found.layers:
            why[name] = "the example does not call it"
        elif isinstance(module, nn.Embedding):
            why[name] = "not the vocabulary's"
        else:
            why[name] = "ends no residual branch, and feeds no layer that does"
    return why


def describe(cut: Cut, whole: Mapping[str, str]) -> Report:
    kinds, details = dict.fromkeys(whole, "whole"), dict(whole)
    for name, style in cut.styles.items():
        kinds[name], details[name] = KINDS[type(style)], words_of(style)
    return Report(cut, kinds, details)


def words_of(style: Any) -> str:
    if isinstance(style, Vocabulary):
        return "by tokens"
    if isinstance(style, Columns) and style.gathered:
        return "by tokens, gathered"
    copies = f", each on {style.copies} ranks" if getattr(style, "copies", 1) > 1 else ""
    blocks: Any = getattr(style, "blocks", 1)
    if isinstance(style.units, tuple):
        several = min(style.units)
        return " + ".join(
            f"{n} units in {length}{copies if n == several else ''}"
            for n, length in zip(style.units, blocks, strict=True)
        )
    units = f"{style.units} units{copies}"
    return units if blocks == 1 or len(blocks) == 1 else f"{units} in each of {blocks}"
