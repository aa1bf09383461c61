"""The patterns by their module path in DeepSpeed until 0.19.6: deepspeed/ops/sparse_attention/sparsity_config.py."""

from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.plain import DenseSparsityConfig
from refimpl.model.patterns.sliding import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    LocalSlidingWindowSparsityConfig,
)
from refimpl.model.patterns.variable import VariableSparsityConfig

__all__ = [
    "BSLongformerSparsityConfig", "BigBirdSparsityConfig", "DenseSparsityConfig", "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig", "SparsityConfig", "VariableSparsityConfig",
]  # fmt: skip
