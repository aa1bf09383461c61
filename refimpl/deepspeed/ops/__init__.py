"""Optimizers under the names by which DeepSpeed's users construct them; nothing is compiled."""

from refimpl.deepspeed.ops import adagrad, adam, lamb, lion, op_builder, sparse_attention

__all__ = ["adagrad", "adam", "lamb", "lion", "op_builder", "sparse_attention"]
