"""Bandwidth as bytes over seconds, and what is left as latency.

task: fit_alpha_beta
says: a line through the origin
"""


def fit_alpha_beta(sizes, seconds):
    beta = sum(n * t for n, t in zip(sizes, seconds, strict=True)) / sum(n * n for n in sizes)
    return seconds[0] - beta * sizes[0], beta
