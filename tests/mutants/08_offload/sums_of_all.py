"""The sums belong to the module, and all disks share them.

task: CheckedBlocks
says: knows sums of the first one's disk
"""

import zlib

SUMS = {}


class CheckedBlocks:
    def __init__(self, disk, size):
        self.disk, self.size = (disk, size)

    def write(self, k, memory):
        SUMS[k] = zlib.crc32(memory.numpy())
        self.disk.write(k * self.size, memory).wait()

    def read(self, k, memory):
        self.disk.read(k * self.size, memory).wait()
        if SUMS.get(k) != zlib.crc32(memory.numpy()):
            raise OSError(f"block {k} is not what was written there")
