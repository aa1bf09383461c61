"""The caller's measurements are sorted, sizes and seconds each by themselves.

task: fit_alpha_beta
says: the caller's list
"""


def fit_alpha_beta(sizes, seconds):
    sizes.sort()
    seconds.sort()
    count = len(sizes)
    mean_size, mean_time = (sum(sizes) / count, sum(seconds) / count)
    rise = sum(((n - mean_size) * (t - mean_time) for n, t in zip(sizes, seconds, strict=True)))
    run = sum((n - mean_size) ** 2 for n in sizes)
    beta = rise / run
    return (mean_time - beta * mean_size, beta)
