"""Where no row came the sum is a constant: the exchange that brought the answers never goes back.

task: combine
says: hangs on no answer
"""

import torch


def combine(answers, routes, weights):
    tokens, k = weights.shape
    if not len(routes):
        return answers.new_zeros(tokens, answers.shape[1])
    rows = answers.float() * weights.flatten()[routes].unsqueeze(1)
    out = torch.zeros(tokens, answers.shape[1]).index_add(0, routes // k, rows)
    return out.to(answers.dtype)
