"""The sum is taken of what the disk gives back after the write.

task: CheckedBlocks
says: was not written, and nobody noticed
"""

import zlib


class CheckedBlocks:
    def __init__(self, disk, size):
        self.disk, self.size = (disk, size)
        self.sums = {}

    def write(self, k, memory):
        self.disk.write(k * self.size, memory).wait()
        self.disk.read(k * self.size, memory).wait()
        self.sums[k] = zlib.crc32(memory.numpy())

    def read(self, k, memory):
        self.disk.read(k * self.size, memory).wait()
        if self.sums.get(k) != zlib.crc32(memory.numpy()):
            raise OSError(f"block {k} is not what was written there")
