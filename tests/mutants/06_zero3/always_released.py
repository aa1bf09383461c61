"""Frees everything after use, whatever comes next.

task: to_release
says: bytes are gathered: keep it
"""


def to_release(trace, at, sizes, live, max_reuse_distance):
    return list(live)
