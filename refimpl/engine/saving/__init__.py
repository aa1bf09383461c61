"""Checkpoints: what of a run goes into one, how it is written, and how it comes back into any layout."""
