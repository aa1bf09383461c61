"""Rows are copied to their token, not added.

task: combine
says: overwrites the others
"""


def combine(answers, routes, weights):
    tokens, k = weights.shape
    rows = answers.float() * weights.flatten()[routes, None]
    return rows.new_zeros(tokens, answers.shape[1]).index_copy(0, routes // k, rows).to(answers.dtype)
