"""Axes are told by the beginnings of their names.

task: mesh_groups
says: these are not the groups along those axes
"""

from itertools import product


def mesh_groups(axes, along):
    groups = {}
    for rank, place in enumerate(product(*(range(size) for size in axes.values()))):
        key = tuple((at for name, at in zip(axes, place, strict=True) if not any(name.startswith(a) for a in along)))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
