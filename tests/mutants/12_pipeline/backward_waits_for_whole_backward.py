"""A backward waits for a whole B of the next stage, never for its input half.

task: play
says: ValueError
"""

from collections.abc import Mapping


def _ready(op: Op, spans: Mapping[Op, tuple[float, float]], last: int) -> list[float] | None:
    kind, stage, k = op
    needs: list[tuple[Op, ...]] = []  # of each, one of these
    if kind == "F" and stage > 0:
        needs = [(("F", stage - 1, k),)]
    if kind == "W":
        needs = [(("I", stage, k),)]
    if kind in "BI":
        needs = [(("F", stage, k),)]
        needs += [(("B", stage + 1, k),)] if stage < last else []
    ends = [[spans[other][1] for other in either if other in spans] for either in needs]
    return [found[0] for found in ends] if all(ends) else None
