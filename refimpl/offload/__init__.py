"""A home for what a rank keeps between steps: the device, the host's memory, or a disk."""
