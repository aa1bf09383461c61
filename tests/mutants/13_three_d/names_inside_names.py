"""An axis counts as named if its name is inside another's.

task: mesh_groups
says: these are not the groups along those axes
"""

from itertools import product


def mesh_groups(axes, along):
    groups = {}
    for rank, place in enumerate(product(*(range(size) for size in axes.values()))):
        key = tuple((at for name, at in zip(axes, place, strict=True) if name not in "".join(along)))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
