"""A chunk of the plain weight, which all of it stays behind.

task: ColumnLinear
says: is a view
"""


def _part(whole, dim, group):
    if whole.shape[dim] % group.size:
        raise ValueError(f"{whole.shape[dim]} features cannot be dealt to {group.size} ranks equally")
    return whole.detach().chunk(group.size, dim)[group.rank]
