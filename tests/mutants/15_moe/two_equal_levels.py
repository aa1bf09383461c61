"""x is cut for the inner group as it lies.

task: two_level_all_to_all
says: what arrives
"""

import torch


def two_level_all_to_all(x, inner, outer):
    n, nodes = (inner.size, outer.size)
    for_places = x.reshape(n, nodes, -1).contiguous()
    from_places = torch.empty_like(for_places)
    inner.all_to_all(from_places, for_places)
    for_nodes = from_places.transpose(0, 1).contiguous()
    from_nodes = torch.empty_like(for_nodes)
    outer.all_to_all(from_nodes, for_nodes)
    return from_nodes.view_as(x)
