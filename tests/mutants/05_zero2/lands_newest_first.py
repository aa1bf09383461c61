"""Launches wait for the oldest, the end for the newest.

task: InFlight
says: land waits for one that was launched later
"""

from collections import deque


class InFlight:
    def __init__(self, group, most):
        self.group, self.most, self.ways, self.shards = group, most, deque(), {}

    def launch(self, number, flat):
        if len(self.ways) == self.most:
            self.settle()
        out = flat.new_empty(len(flat) // self.group.size)
        self.ways.append((number, self.group.reduce_scatter(out, flat, "mean", async_op=True), out, flat))

    def settle(self):
        number, work, out, _flat = self.ways.popleft()
        work.wait()
        if number in self.shards:
            self.shards[number] += out
        else:
            self.shards[number] = out

    def land(self):
        self.ways.reverse()
        while self.ways:
            self.settle()
