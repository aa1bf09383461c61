"""The bandwidth, where its inverse is asked.

task: fit_alpha_beta
says: beta is seconds a byte
"""


def fit_alpha_beta(sizes, seconds):
    size, time = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    rise = sum((n - size) * (t - time) for n, t in zip(sizes, seconds, strict=True))
    run = sum((n - size) ** 2 for n in sizes)
    return time - rise / run * size, run / rise
