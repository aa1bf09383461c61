"""A new bias, under the same name.

task: rebalance
says: bias is changed in place
"""


def rebalance(bias, counts, rate, group):
    total = counts.clone()
    group.all_reduce(total)
    bias = bias + rate * (total.sum() - len(total) * total).sign()
