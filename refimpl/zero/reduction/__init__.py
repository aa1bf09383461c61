"""Gradients on their way: how a bucket fills, travels (plain or compressed) and rests until the update."""
