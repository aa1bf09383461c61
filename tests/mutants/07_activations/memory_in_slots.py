"""Bytes are rounded to hundredths of the budget, so that large numbers take no more work than small ones.

task: least_time
says: it fits to the byte
"""

import math
from functools import cache


def least_time(seconds, inputs, saved, budget):
    slot = max(1, budget // 100)
    inputs, saved = [-(-n // slot) for n in inputs], [-(-n // slot) for n in saved]

    @cache
    def best(i: int, t: int, room: int) -> float:
        if i == t:
            return 0.0
        if room < 0:
            return math.inf
        after = inputs[i + 1] if i + 1 < t else 0
        least = seconds[i] + best(i + 1, t, room - saved[i] - after) if saved[i] <= room else math.inf
        for j in range(i + 1, t):
            if inputs[j] <= room:
                least = min(least, sum(seconds[i:j]) + best(j, t, room - inputs[j]) + best(i, j, room))
        return least

    return best(0, len(seconds), budget // slot)
