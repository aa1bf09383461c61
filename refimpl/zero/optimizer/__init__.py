"""The optimizer of a stage: its fp32 masters and states by slices, and which optimizers may be cut so."""
