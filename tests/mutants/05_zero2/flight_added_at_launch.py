"""Added to what was there at launch: the one still under way is lost.

task: InFlight
says: is missing
"""

import torch


class InFlight(InFlight):
    def launch(self, number, flat):
        if len(self.flights) == self.most:
            self.settle()
        mine = torch.empty_like(flat[: len(flat) // self.group.size])
        work = self.group.reduce_scatter(mine, flat, "mean", async_op=True)
        self.flights.append((number, work, self.shards.get(number), mine))

    def settle(self):
        number, work, before, mine = self.flights.popleft()
        work.wait()
        self.shards[number] = mine if before is None else before + mine
