"""Counting: traffic and events, live memory by class, time."""
