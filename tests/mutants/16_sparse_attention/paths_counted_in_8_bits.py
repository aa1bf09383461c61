"""Ways from block to block are counted in 8 bits, of which 256 are none.

task: layers_to_see
says: 256 ways from the first block to the last
"""

import torch


def layers_to_see(layout):
    n = len(layout)
    known = torch.eye(n, dtype=torch.bool)
    if int(layout.sum()) > n * n:
        raise ValueError
    steps = torch.where(known, 0, -1)
    for layer in range(1, n + 1):
        new = known | (layout.to(torch.int8) @ known.to(torch.int8) > 0)
        steps[new & ~known] = layer
        if torch.equal(new, known):
            break
        known = new
    return steps
