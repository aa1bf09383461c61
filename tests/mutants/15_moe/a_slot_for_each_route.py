"""Rows are put back for all routes first, those that were dropped too.

task: combine
says: or rows for what was dropped
"""

from torch import Tensor


def combine(answers: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
    tokens, k = weights.shape
    rows = answers.float() * weights.flatten()[routes].unsqueeze(1)
    slots = rows.new_zeros(tokens * k, answers.shape[1]).index_copy(0, routes, rows)
    return slots.view(tokens, k, answers.shape[1]).sum(1).to(answers.dtype)
