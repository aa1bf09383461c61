"""The knobs of chapter 15: which routes an expert keeps and drops, and which of its places stay empty.

Logits are normal, plus `skew` times a ramp from 1 for the first expert to 0 for the last: at 0 all are as popular.
Routes find their places as in GShard, all first choices before any second one.

    dropped    of the k T routes     lost: these tokens go on without this expert
    empty      of the E C places     padding: sent and multiplied for nothing
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from refimpl.model.gates import Routing, route
from refimpl.notebook import show
from refimpl.notebook.widgets import Knobs

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TOKENS = 1024
COLOURS = {"kept": "#4c72b0", "dropped": "#c44e52", "empty": "#d8d8d8"}


def routed(experts: int, k: int, factor: float, skew: float) -> dict[str, torch.Tensor]:
    """Of each expert [E]: routes kept, routes dropped, empty places."""
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, experts, generator=chance) + skew * torch.linspace(1, 0, experts)
    routes = route(logits, Routing(k=k, capacity_factor=factor, drop="choice"))
    kept = routes.counts.clamp(max=routes.capacity)
    return {"kept": kept, "dropped": routes.counts - kept, "empty": routes.capacity - kept}


def bars(experts: int, k: int, factor: float, skew: float) -> "Figure":
    """A bar an expert: what it keeps, above it what it drops or what stays empty."""
    found = routed(experts, k, factor, skew)
    figure, axis = show.figure(3)
    under = torch.zeros(experts)
    for name, height in found.items():
        axis.bar(range(experts), height, bottom=under, color=COLOURS[name], label=name, width=0.85)
        under = under + height
    lost, idle = shares(found)
    axis.set(
        xlabel="expert", ylabel="routes", title=f"dropped {lost:.0%} of the routes, empty {idle:.0%} of the places"
    )
    axis.legend(frameon=False, fontsize=9)
    return figure


def shares(found: dict[str, torch.Tensor]) -> tuple[float, float]:
    """(dropped of all routes, empty of all places)."""
    kept, dropped, empty = (int(found[name].sum()) for name in ("kept", "dropped", "empty"))
    return dropped / (kept + dropped), empty / (kept + empty)


def table(factors: Sequence[float], skews: Sequence[float], experts: int = 8, k: int = 2) -> "pd.DataFrame":
    """What the bars say, for some capacity factors and skews."""
    import pandas as pd

    rows = []
    for skew in skews:
        for factor in factors:
            lost, idle = shares(routed(experts, k, factor, skew))
            rows.append([skew, factor, f"{lost:.0%}", f"{idle:.0%}"])
    return pd.DataFrame(rows, columns=["skew", "capacity factor", "dropped", "empty"])


def gate_knobs(
    experts: Sequence[int] = (8, 4, 16, 32),
    k: Sequence[int] = (2, 1, 4),
    factor: Sequence[float] = (1.25, 1.0, 1.5, 2.0, 4.0),
    skew: Sequence[float] = (1.0, 0.0, 0.5, 2.0, 3.0),
) -> Knobs:
    """Bars of one batch; turn the experts, k, the capacity factor and the skew. The first of each is the start."""
    text = table(sorted(factor)[:4], (min(skew), max(skew)), experts[0], k[0])
    return Knobs(bars, text, experts=experts, k=k, factor=factor, skew=skew)
