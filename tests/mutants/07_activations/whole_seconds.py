"""The first run's seconds are rounded down.

task: least_time
says: less than is possible
"""


def least_time(seconds, inputs, saved, budget):
    from functools import cache
    from math import inf

    @cache
    def time(i, t, m):
        if m < 0:
            return inf
        if i == t:
            return 0.0
        best = inf
        if saved[i] <= m:
            best = seconds[i] + time(i + 1, t, m - saved[i] - (inputs[i + 1] if i + 1 < t else 0))
        for j in range(i + 1, t):
            first_run = int(sum(seconds[i:j]))
            best = min(best, first_run + time(j, t, m - inputs[j]) + time(i, j, m))
        return best

    return time(0, len(seconds), budget)
