"""What `refimpl.parallel.autotp` finds out about a model that it has never seen: trace, units, regions, rehearsal."""
