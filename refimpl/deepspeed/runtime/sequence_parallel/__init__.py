"""Ulysses for transformers' models by DeepSpeed's names."""
