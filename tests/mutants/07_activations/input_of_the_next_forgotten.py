"""The input of the next layer takes no bytes.

task: least_time
says: are too few, and yet there is a result
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
            best = seconds[i] + time(i + 1, t, m - saved[i] - 0)
        for j in range(i + 1, t):
            first_run = sum(seconds[i:j])
            best = min(best, first_run + time(j, t, m) + time(i, j, m))
        return best

    return time(0, len(seconds), budget)
