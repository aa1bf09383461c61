"""The shards are kept on the class: the next InFlight adds to those of the one before.

task: InFlight
says: a new InFlight has shards
"""

from collections import deque

import torch


class InFlight:
    shards = {}  # noqa: RUF012

    def __init__(self, group, most):
        self.group, self.most = group, most
        self.flights = deque()

    def launch(self, number, flat):
        if len(self.flights) == self.most:
            self.settle()
        mine = torch.empty_like(flat[: len(flat) // self.group.size])
        work = self.group.reduce_scatter(mine, flat, "mean", async_op=True)
        self.flights.append((number, work, mine))

    def settle(self):
        number, work, mine = self.flights.popleft()
        work.wait()
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine

    def land(self):
        while self.flights:
            self.settle()
