"""A block without a sum is believed.

task: CheckedBlocks
says: block 4 was never written, and yet it is read without an error
"""

import zlib


class CheckedBlocks(CheckedBlocks):
    def read(self, k, memory):
        self.disk.read(k * self.size, memory).wait()
        if self.sums.get(k, zlib.crc32(memory.numpy())) != zlib.crc32(memory.numpy()):
            raise OSError(f"block {k} is not what was written there")
