"""The load of this rank, without the others.

task: rebalance
says: by this rank's tokens alone
"""


def rebalance(bias, counts, rate, group):
    total = counts.clone()
    bias += rate * (total.sum() - len(total) * total).sign()
