"""Relative errors are made small.

task: fit_alpha_beta
says: relative errors are made small
"""


def fit_alpha_beta(sizes, seconds):
    w = [1 / t**2 for t in seconds]
    mx = sum((a * x for a, x in zip(w, sizes, strict=False))) / sum(w)
    my = sum((a * y for a, y in zip(w, seconds, strict=False))) / sum(w)
    beta = sum((a * (x - mx) * (y - my) for a, x, y in zip(w, sizes, seconds, strict=False))) / sum(
        (a * (x - mx) ** 2 for a, x in zip(w, sizes, strict=False))
    )
    return (my - beta * mx, beta)
