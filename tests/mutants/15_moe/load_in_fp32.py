"""The counts are made fp32 to have a mean.

task: rebalance
says: rebalance sends
"""


def rebalance(bias, counts, rate, group):
    total = counts.float()
    group.all_reduce(total)
    bias += rate * (total.mean() - total).sign()
