"""By how many means an expert lacks.

task: rebalance
says: as much as is missing, in means
"""


def rebalance(bias, counts, rate, group):
    total = counts.clone()
    group.all_reduce(total)
    bias += rate * (1 - len(total) * total / total.sum())
