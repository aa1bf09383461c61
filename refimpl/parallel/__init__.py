"""Parallel axes beside data: tensor, sequence, pipeline, context."""
