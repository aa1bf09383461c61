"""A pattern by the name and the options that DeepSpeed's JSON gives it."""

from collections.abc import Callable, Mapping
from typing import Any

from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.plain import DenseSparsityConfig
from refimpl.model.patterns.sliding import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    LocalSlidingWindowSparsityConfig,
)
from refimpl.model.patterns.variable import VariableSparsityConfig

PATTERNS: Mapping[str, tuple[Callable[..., SparsityConfig], str]] = {
    "dense": (DenseSparsityConfig, "block"),
    "fixed": (
        FixedSparsityConfig,
        "block different_layout_per_head num_local_blocks num_global_blocks attention horizontal_global_attention "
        "num_different_global_patterns",
    ),
    "variable": (
        VariableSparsityConfig,
        "block different_layout_per_head num_random_blocks local_window_blocks global_block_indices "
        "global_block_end_indices attention horizontal_global_attention seed",
    ),
    "bigbird": (
        BigBirdSparsityConfig,
        "block different_layout_per_head num_random_blocks num_sliding_window_blocks num_global_blocks attention seed",
    ),
    "bslongformer": (
        BSLongformerSparsityConfig,
        "block different_layout_per_head num_sliding_window_blocks global_block_indices global_block_end_indices "
        "attention",
    ),
    "local": (LocalSlidingWindowSparsityConfig, "block num_sliding_window_blocks attention"),
}


def pattern_named(mode: str, num_heads: int, options: Mapping[str, Any]) -> SparsityConfig:
    """The pattern that `mode` names, with those of `options` that it reads (a file for DeepSpeed may list all).

    NotImplementedError for another mode, as in DeepSpeed; ValueError from the pattern itself.
    """
    if mode not in PATTERNS:
        raise NotImplementedError(f"sparse_attention.mode is {mode!r}: choose from {', '.join(PATTERNS)}")
    make, reads = PATTERNS[mode]
    return make(num_heads=num_heads, **{name: options[name] for name in reads.split() if name in options})
