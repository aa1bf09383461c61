"""The next position is held within the sequence.

task: context_batch
says: is its own target
"""


def context_batch(tokens, positions):
    pad = positions < 0
    nxt = (positions + 1).clamp(max=tokens.shape[1] - 1)
    return tokens[:, positions].masked_fill(pad, 0), tokens[:, nxt].masked_fill(pad, -100)
