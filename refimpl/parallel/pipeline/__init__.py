"""Layers dealt out to ranks in stages; micro-batches pass through them, by a schedule that is a table."""
