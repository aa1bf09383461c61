"""Predictions from a configuration: bytes, traffic and time for any number of ranks."""
