"""0/1 Adam under DeepSpeed's name. DeepSpeed until 0.19.6: deepspeed/runtime/fp16/onebit/zoadam.py."""

from refimpl.deepspeed.runtime.fp16.onebit.arguments import Arguments
from refimpl.optim.zero_one_adam import ZeroOneAdam as Ours


class ZeroOneAdam(Arguments, Ours):
    """refimpl's, with DeepSpeed's order of arguments."""
