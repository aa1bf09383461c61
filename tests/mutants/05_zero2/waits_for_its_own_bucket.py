"""A bucket that is under way is waited for before it is launched again.

task: InFlight
says: launch waits although there is room
"""

from collections import deque

import torch


class InFlight:
    def __init__(self, group, most):
        self.group, self.most = (group, most)
        self.shards = {}
        self.flights = deque()

    def launch(self, number, flat):
        if len(self.flights) == self.most or any(f[0] == number for f in self.flights):
            self.settle()
        mine = torch.empty_like(flat[: len(flat) // self.group.size])
        work = self.group.reduce_scatter(mine, flat, "mean", async_op=True)
        self.flights.append((number, work, flat, mine))

    def settle(self):
        number, work, _, mine = self.flights.popleft()
        work.wait()
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine

    def land(self):
        while self.flights:
            self.settle()
