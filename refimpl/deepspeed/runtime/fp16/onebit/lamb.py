"""1-bit LAMB under DeepSpeed's name. DeepSpeed until 0.19.6: deepspeed/runtime/fp16/onebit/lamb.py."""

from refimpl.deepspeed.runtime.fp16.onebit.arguments import Arguments
from refimpl.optim.one_bit_lamb import OneBitLamb


class OnebitLamb(Arguments, OneBitLamb):
    """refimpl's, with DeepSpeed's order of arguments."""
