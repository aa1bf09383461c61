"""The last token that a rank has is taken for the sequence's last.

task: context_batch
says: a token has none, and another follows it
"""


def context_batch(tokens, positions):
    padding = positions < 0
    following = tokens[:, (positions + 1).clamp(max=tokens.shape[1] - 1)]
    none = padding | (positions == positions.amax())
    return tokens[:, positions].masked_fill(padding, 0), following.masked_fill(none, -100)
