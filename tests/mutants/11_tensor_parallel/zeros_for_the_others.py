"""Backward puts its own tokens into zeros.

task: scatter_sum
says: zeros for the other ranks' tokens
"""


def scatter_sum(x, group):
    return _exchange(x, group, _own_tokens, _padded)


def _padded(grad, group):
    zeros = grad.new_zeros(grad.shape[0], grad.shape[1] * group.size, grad.shape[2])
    zeros.chunk(group.size, 1)[group.rank].copy_(grad)
    return zeros
