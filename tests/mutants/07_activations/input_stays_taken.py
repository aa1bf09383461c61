"""The input behind a stretch is still counted while the stretch runs again.

task: least_time
says: a second run has all m bytes
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
            best = min(best, sum(seconds[i:j]) + time(j, t, m - inputs[j]) + time(i, j, m - inputs[j]))
        return best

    return time(0, len(seconds), budget)
