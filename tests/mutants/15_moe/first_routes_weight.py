"""A token's first weight is everybody's.

task: combine
says: all have the weight of its first route
"""


def combine(answers, routes, weights):
    tokens, k = weights.shape
    rows = answers.float() * weights[routes // k, :1]
    return rows.new_zeros(tokens, answers.shape[1]).index_add(0, routes // k, rows).to(answers.dtype)
