"""Clears the answers when they have left.

task: give_back
says: answers was changed: it is an input
"""

_right = give_back


def give_back(answers, counts, sizes, group):
    found = _right(answers, counts, sizes, group)
    answers.detach().zero_()
    return found
