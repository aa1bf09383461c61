"""Optimizers and attentions under the names by which DeepSpeed's users construct them; nothing is compiled."""

from refimpl.deepspeed.git_version_info import compatible_ops as __compatible_ops__
from refimpl.deepspeed.ops import adagrad, adam, aio, deepspeed4science, lamb, lion, op_builder, sparse_attention

__all__ = [
    "__compatible_ops__", "adagrad", "adam", "aio", "deepspeed4science", "lamb", "lion", "op_builder",
    "sparse_attention",
]  # fmt: skip
