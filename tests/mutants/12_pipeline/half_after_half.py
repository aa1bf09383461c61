"""The input half waits for an input half, and B for a B.

task: play
says: a backward needs B or I of the next stage
"""


def _ready(op, spans, last):
    kind, stage, k = op
    needs = []
    if kind == "F" and stage > 0:
        needs = [("F", stage - 1, k)]
    if kind == "W":
        needs = [("I", stage, k)]
    if kind in "BI":
        needs = [("F", stage, k)] + ([(kind, stage + 1, k)] if stage < last else [])
    return [spans[n][1] for n in needs] if all(n in spans for n in needs) else None
