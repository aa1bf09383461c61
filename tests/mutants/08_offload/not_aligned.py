"""Writes where the data begins, as an ordinary file allows.

task: write_bytes
says: beyond a multiple of 4096
"""


def write_bytes(disk, start, data):
    disk.write(start, data).wait()
