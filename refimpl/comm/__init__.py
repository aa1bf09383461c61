"""Communication: a group of ranks, its collectives, and meshes of groups."""
