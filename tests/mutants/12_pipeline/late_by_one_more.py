"""Counts the half that has just come as one that waits already.

task: zb_h1
says: expected W of stage
"""

from collections.abc import Sequence


def zb_h1(order: Sequence[Op], late: int) -> list[Op]:
    result: list[Op] = []
    waiting: list[Op] = []
    for kind, stage, k in order:
        if kind != "B":
            result.append((kind, stage, k))
            continue
        result.append(("I", stage, k))
        waiting.append(("W", stage, k))
        if len(waiting) > late + 1:
            result.append(waiting.pop(0))
    return result + waiting
