"""What arrives between the nodes is not put in order.

task: two_level_all_to_all
says: ranks lie by their place, and then by node
"""

import torch


def two_level_all_to_all(x, inner, outer):
    n, nodes = (inner.size, outer.size)
    for_places = x.view(nodes, n, -1).transpose(0, 1).contiguous()
    from_places = torch.empty_like(for_places)
    inner.all_to_all(from_places, for_places)
    for_nodes = from_places.transpose(0, 1).contiguous()
    from_nodes = torch.empty_like(for_nodes)
    outer.all_to_all(from_nodes, for_nodes)
    return from_nodes.transpose(0, 1).reshape(x.shape)
