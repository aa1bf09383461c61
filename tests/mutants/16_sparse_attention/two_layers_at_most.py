"""One layer is taken for all of them.

task: layers_to_see
says: only one layer is counted
"""

import torch
from torch import Tensor


def layers_to_see(layout: Tensor) -> Tensor:
    layers = torch.where(layout, 1, -1)
    return layers.fill_diagonal_(0)
