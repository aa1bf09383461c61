"""The axes are sorted.

task: mesh_groups
says: in the order of their names
"""

from itertools import product


def mesh_groups(axes, along):
    names = sorted(axes)
    groups = {}
    for rank, place in enumerate(product(*(range(axes[n]) for n in names))):
        groups.setdefault(tuple(a for n, a in zip(names, place, strict=True) if n not in along), []).append(rank)
    return list(groups.values())
