"""Padding has a target.

task: context_batch
says: padding has a target
"""


def context_batch(tokens, positions):
    after = positions + 1
    targets = tokens[:, after.clamp(max=tokens.shape[1] - 1)].masked_fill(after == tokens.shape[1], IGNORED)
    return tokens[:, positions].masked_fill(positions < 0, 0), targets
