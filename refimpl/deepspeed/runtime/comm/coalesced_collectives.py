"""One reduce-scatter for many tensors. DeepSpeed: deepspeed/runtime/comm/coalesced_collectives.py.

What that file has of int4 is `zero_quantized_gradients` here: refimpl/zero/reduction/quantised_sum.py.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from refimpl.deepspeed import comm


@torch.no_grad()
def reduce_scatter_coalesced(tensors: list[Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
    """The mean of each tensor [n] over the ranks, this rank's part: elements r c to (r + 1) c, c = ceil(n / N), flat.

    The last parts may be shorter, or empty. One collective; all tensors of one dtype, which keep their values.
    """
    rank, ranks = comm.get_rank(group), comm.get_world_size(group)
    sizes = [-(-t.numel() // ranks) for t in tensors]  # of a part
    rows = [pad(t.reshape(-1), (0, c * ranks - t.numel())).view(ranks, c) for t, c in zip(tensors, sizes, strict=True)]
    whole = torch.cat(rows, dim=1) / ranks  # [N, all parts of one rank]; divided first: 16 bits hold the sum
    mine = torch.empty_like(whole[rank])
    comm.reduce_scatter_tensor(mine, whole.view(-1), group=group)
    found = mine.split(sizes)  # type: ignore[no-untyped-call]
    return [part[: max(0, t.numel() - rank * len(part))] for part, t in zip(found, tensors, strict=True)]
