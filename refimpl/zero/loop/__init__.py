"""A stage in a training loop: what it does by itself, and what a script calls, reads and changes on it."""
