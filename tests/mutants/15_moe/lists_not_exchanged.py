"""The same lists as on the way there.

task: give_back
says: give_back
"""


def give_back(answers, counts, sizes, group):
    there = counts.view(group.size, -1).sum(1).tolist()
    return _moved(answers, there, sizes.sum(1).tolist(), group)
