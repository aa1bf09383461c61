"""The mean of the slopes between one measurement and the next.

task: fit_alpha_beta
says: beta: wrong values
"""

from itertools import pairwise


def fit_alpha_beta(sizes, seconds):
    count = len(sizes)
    steps = pairwise(zip(sizes, seconds, strict=True))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in steps if b[0] != a[0]]
    beta = sum(slopes) / len(slopes)
    return sum(seconds) / count - beta * sum(sizes) / count, beta
