"""Side-by-side measurements: the same work done by this package and by its peers, in one run, on the same ranks."""
