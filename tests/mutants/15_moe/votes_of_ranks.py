"""Each rank says which of its experts have too much, and the majority of ranks decides.

task: rebalance
says: add up the counts, then compare
"""


def rebalance(bias, counts, rate, group):
    votes = (counts.sum() - len(counts) * counts).sign()
    group.all_reduce(votes)
    bias += rate * votes.sign()
