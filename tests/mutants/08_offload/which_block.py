"""The error does not say which block it is.

task: CheckedBlocks
says: the error must name block
"""

import zlib


class CheckedBlocks(CheckedBlocks):
    def read(self, k, memory):
        self.disk.read(k * self.size, memory).wait()
        if self.sums.get(k) != zlib.crc32(memory.numpy()):
            raise OSError("checksum mismatch")
