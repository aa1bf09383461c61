"""1-bit Adam under DeepSpeed's name. DeepSpeed until 0.19.6: deepspeed/runtime/fp16/onebit/adam.py."""

from refimpl.deepspeed.runtime.fp16.onebit.arguments import Arguments
from refimpl.optim.one_bit_adam import OneBitAdam


class OnebitAdam(Arguments, OneBitAdam):
    """refimpl's, with DeepSpeed's order of arguments."""
