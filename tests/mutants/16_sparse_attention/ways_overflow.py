"""Powers of the layout count the ways from block to block: infinitely many of them are none after the next product.

task: layers_to_see
says: ways from block to block are counted, until their number is infinite
"""

import torch


def layers_to_see(layout):
    n = len(layout)
    layers = torch.full((n, n), -1)
    layers.fill_diagonal_(0)
    ways = layout.float()
    for k in range(1, n):
        layers[(ways > 0) & (layers < 0)] = k
        ways = ways @ layout.float()
    return layers
