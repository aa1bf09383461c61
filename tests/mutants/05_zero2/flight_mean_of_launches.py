"""The mean over the launches of a bucket.

task: InFlight
says: it is the mean over its launches
"""

from collections import deque

import torch


class InFlight:
    def __init__(self, group, most):
        self.group, self.most = group, most
        self.shards, self.counts = {}, {}
        self.flights = deque()

    def launch(self, number, flat):
        if len(self.flights) == self.most:
            self.settle()
        mine = torch.empty_like(flat[: len(flat) // self.group.size])
        work = self.group.reduce_scatter(mine, flat, "mean", async_op=True)
        self.flights.append((number, work, flat, mine))

    def settle(self):
        number, work, _, mine = self.flights.popleft()
        work.wait()
        count = self.counts[number] = self.counts.get(number, 0) + 1
        before = self.shards.get(number, torch.zeros_like(mine))
        self.shards[number] = before + (mine - before) / count

    def land(self):
        while self.flights:
            self.settle()
