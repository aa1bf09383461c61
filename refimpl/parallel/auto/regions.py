"""Which layers are cut together: rows at the end of a residual branch, columns before them; tables with their head.

    region    rows {o}, columns {q, k, v}                    whatever feeds a row layer directly is cut by columns, and
              rows {down}, columns {gate, up}                whatever columns feed directly is cut by rows
    words     tables {wte}, heads {lm_head}                  cut by rows of the vocabulary

T5's position bias, an embedding with a feature a head, feeds the attention of all layers: they are one region with it.
A plain stack of linear layers has no residual; there layers are paired as they come.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from refimpl.parallel.auto.trace import Trace, plain_layers
from refimpl.parallel.auto.units import Dealt, Units, find_units
from refimpl.parallel.split import Split
from refimpl.parallel.styles import Columns, EmbeddingColumns, Rows, Style, Vocabulary


@dataclass
class Region:
    """Layers that are cut together or not at all, and how."""

    styles: dict[str, Style]
    units: Units | None = None
    around: list[str] = field(default_factory=list)  # the modules that may know how wide its layers are
    counts: dict[int, list[Split]] = field(default_factory=dict)  # numbers of heads -> what they may count
    sizes: dict[int, list[Split]] = field(default_factory=dict)  # widths


def find_regions(found: Trace, residual: set[str], ranks: int) -> tuple[list[Region], dict[str, str]]:
    """Regions in call order, and why other layers that end a residual branch are in none."""
    linear = [name for name, module in found.layers.items() if not isinstance(module, nn.Embedding)]
    near = {name: found.near(name) for name in linear}
    taken = set[str]()
    regions, why = list[Region](), dict[str, str]()
    ends = [name for name in linear if name in residual] or linear
    for end in ends:
        rows, columns = closure(end, near)
        if end in taken or not columns:
            continue
        if rows & columns:
            why.setdefault(end, f"what feeds it feeds other layers too: {short(sorted(rows - {end}))}")
        if rows & columns or (rows | columns) & taken:
            continue
        ends, begins = [name for name in linear if name in rows], [name for name in found.layers if name in columns]
        region = cut(found, ends, begins, near, ranks)
        if isinstance(region, str):
            why |= dict.fromkeys((rows | columns) - set(why), region)
        else:
            regions.append(region)
            taken |= rows | columns
    return regions, {name: reason for name, reason in why.items() if name not in taken}


def closure(end: str, near: dict[str, set[str]]) -> tuple[set[str], set[str]]:
    """(rows, columns): what feeds a row is a column, what a column feeds is a row."""
    rows, columns = {end}, set[str]()
    while True:
        more_columns = set[str]().union(*(near[name] for name in rows))
        more_rows = {name for name, feeds in near.items() if feeds & more_columns}
        if more_rows <= rows and more_columns == columns:
            return rows, columns
        rows, columns = rows | more_rows, more_columns


def cut(found: Trace, rows: list[str], columns: list[str], near: dict[str, set[str]], ranks: int) -> Region | str:
    """How a region is cut, or why not."""
    if any(len({x.shape[-1] for x in found.exits[name]}) != 1 for name in columns):
        return "its calls have different widths"
    units = find_units(found, rows, columns)
    shares = None if units is None else units.dealt(ranks)
    if units is None or (units.number == 1 and shares is None):
        return (
            f"what {short(columns)} give {short(rows)} does not fall into equal runs of features that are independent"
        )
    if shares is None:
        return too_few(units, ranks)
    styles: dict[str, Style] = {name: Rows(units=shares[0]) for name in rows}
    for name in columns:
        dealt, copies = shares[1][name]
        lengths, heads = tuple(length for length, _ in dealt), tuple(number for _, number in dealt)
        if isinstance(found.layers[name], nn.Embedding):
            styles[name] = EmbeddingColumns(units=heads[0])
        else:
            number = heads if len(set(heads)) > 1 else heads[0]
            styles[name] = Columns(units=number, blocks=lengths, copies=copies if min(heads) < ranks else 1)
    around = dict[str, None]()
    for row in rows:
        feeds = [name for name in near[row] if not isinstance(found.layers[name], nn.Embedding)]
        around |= dict.fromkeys(sorted(modules_around([row, *feeds])))
    widths = {x.shape[-1] for name in rows for x in found.entries[name]}
    return Region(styles, units, list(around), *numbers(found, units, shares, widths, ranks))


def too_few(units: Units, ranks: int) -> str:
    """Why so few units cannot be dealt out, not even several times."""
    heads = f", nor {units.most} heads of queries in equal parts" if units.most > units.number else ""
    fit = [n for n in range(2, ranks) if units.dealt(n)]
    return (
        f"{units.number} units cannot be dealt to {ranks} ranks, each of which needs one{heads}: "
        f"use {', '.join(map(str, fit)) or 'no more than one'} ranks"
    )


def numbers(
    found: Trace, units: Units, shares: tuple[int, dict[str, Dealt]], widths: set[int], ranks: int
) -> tuple[dict[int, list[Split]], dict[int, list[Split]]]:
    """Numbers of heads, and widths, that a module may know -> what each may count."""
    many, (rows, dealt) = Split((shares[0],), shares[0], ranks), shares
    counts, sizes = {rows: [many]} if rows > 1 else {}, {width: [many] for width in widths}
    for name, (blocks, several) in dealt.items():
        for length, number in blocks:
            copies = several if number < ranks else 1
            if copies == ranks:
                continue  # the same numbers as in the whole
            split = Split((number,), number, ranks, copies=copies)
            heads = {number} if copies > 1 else {number, *units.heads[name]}
            for known, values in ((counts, heads - {1}), (sizes, {length, found.exits[name][0].shape[-1]})):
                for n in values:
                    if n % number == 0 and split not in known.setdefault(n, []):
                        known[n].append(split)
            if copies > 1:  # heads of queries that share one of keys: fewer do on a rank
                group = Split((copies,), copies, ranks, copies=number)
                counts[rows // number] = list(dict.fromkeys([*counts.get(rows // number, []), group]))
    return counts, {n: splits for n, splits in sizes.items() if n not in counts}


def modules_around(names: list[str]) -> set[str]:
    """The modules that hold one of these layers, up to the smallest that holds all."""
    parts = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(part) > shared and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return {".".join(part[:depth]) for part in parts for depth in range(shared, len(part) + 1)}


def words(model: nn.Module, found: Trace, residual: set[str], regions: list[Region]) -> Region | None:
    """The tables of the vocabulary, and the linear layers whose outputs are its logits.

    Of tables and heads that are tied, or as large as each other; without a head, the embeddings with the most rows.
    """
    layers, ends = plain_layers(model), found.last()
    free = {name: layer for name, layer in layers.items() if not any(name in region.styles for region in regions)}
    tables = {name: layer for name, layer in free.items() if isinstance(layer, nn.Embedding)}
    rows = {layer.num_embeddings for name, layer in tables.items() if name in found.layers}
    last = {name: layer for name, layer in free.items() if name in ends - residual}
    many = {number for number in rows if number > max(rows) // 4}  # not two classes, which are two kinds of token too
    logits = {name: layer for name, layer in last.items() if getattr(layer, "out_features", 0) in many}
    sizes: set[Any] = {layer.out_features for layer in logits.values()} or {max(rows, default=0)}
    chosen = {name: layer for name, layer in tables.items() if layer.num_embeddings in sizes} | logits
    weights = {layer.weight for layer in chosen.values()}
    chosen |= {name: layer for name, layer in free.items() if layer.weight in weights}
    styles: dict[str, Style] = {
        name: Vocabulary() if name in tables else Columns(gathered=True) for name in layers if name in chosen
    }
    return Region(styles) if styles else None


def short(names: list[str]) -> str:
    """Names without their numbers, each once, not more than four."""
    known = list(dict.fromkeys(pattern(name) for name in names))
    return ", ".join(known[:4]) + (", ..." if len(known) > 4 else "")


def pattern(text: str) -> str:
    """layers.3.mlp -> layers.*.mlp."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", text)
