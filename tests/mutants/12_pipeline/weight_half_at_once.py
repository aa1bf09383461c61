"""Each weight half right behind its input half: 1F1B with other words.

task: zb_h1
says: expected F of stage
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
        if len(waiting) > 0:
            result.append(waiting.pop(0))
    return result + waiting
