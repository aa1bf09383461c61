"""Each token's loss of a sequence that ranks share, by DeepSpeed's name.

Every rank has all the losses, and calls backward on the same mean of them. A token's gradient is what all N ranks ask
of it, N times the mean's; the engine averages over these ranks, and has the gradient of one process. DeepSpeed's
function asks on a token's own rank alone: its engine adds over a sequence's ranks at stages 0 to 2, and averages at
stage 3, which trains with 1/N of that gradient. DeepSpeed: deepspeed/sequence/cross_entropy.py.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from refimpl.deepspeed.sequence.layer import group_of
from refimpl.parallel.conjugates import gather_sum


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, sp_group: ProcessGroup | None
) -> Tensor:
    """This rank's logits [T/N, B, V] and targets [T/N, B] -> the losses [T, B] of all tokens, in the logits' dtype.

    A collective, backward too.
    """
    each = F.cross_entropy(vocab_parallel_logits.float().flatten(0, 1), target.flatten(), reduction="none")
    return gather_sum(each.view_as(target).to(vocab_parallel_logits.dtype), group_of(sp_group), dim=0)
