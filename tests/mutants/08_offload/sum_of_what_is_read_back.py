"""The sum is taken of what the disk gives back after the write.

task: CheckedBlocks
says: was not written, and nobody noticed
"""

import zlib


class CheckedBlocks(CheckedBlocks):
    def write(self, k, memory):
        self.disk.write(k * self.size, memory).wait()
        self.disk.read(k * self.size, memory).wait()
        self.sums[k] = zlib.crc32(memory.numpy())
