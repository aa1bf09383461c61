"""The error does not say which block it is.

task: CheckedBlocks
says: the error must name block
"""

import zlib


class CheckedBlocks:
    def __init__(self, disk, size):
        self.disk, self.size = (disk, size)
        self.sums = {}

    def write(self, k, memory):
        self.sums[k] = zlib.crc32(memory.numpy())
        self.disk.write(k * self.size, memory).wait()

    def read(self, k, memory):
        self.disk.read(k * self.size, memory).wait()
        if self.sums.get(k) != zlib.crc32(memory.numpy()):
            raise OSError("checksum mismatch")
