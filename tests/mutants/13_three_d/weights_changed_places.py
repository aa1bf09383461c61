"""Each out is weighted by the other's share.

task: merge
says: each out has the other's weight
"""

import torch


def merge(one, other):
    (a, la), (b, lb) = one, other
    share = torch.sigmoid((la - lb).nan_to_num(0.0))[..., None]
    return a * (1 - share) + b * share, torch.logaddexp(la, lb)
