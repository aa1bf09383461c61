"""A sum of bytes, which does not tell their order.

task: CheckedBlocks
says: block 0 is not what was written, and nobody noticed
"""


class CheckedBlocks(CheckedBlocks):
    def write(self, k, memory):
        self.sums[k] = int(memory.long().sum())
        self.disk.write(k * self.size, memory).wait()

    def read(self, k, memory):
        self.disk.read(k * self.size, memory).wait()
        if self.sums.get(k) != int(memory.long().sum()):
            raise OSError(f"block {k} is not what was written there")
