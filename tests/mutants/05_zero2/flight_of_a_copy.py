"""The buffer is copied, and the copy travels.

task: InFlight
says: `flat` is copied before it travels
"""

import torch


class InFlight(InFlight):
    def launch(self, number, flat):
        if len(self.flights) == self.most:
            self.settle()
        flat = flat.clone()
        mine = torch.empty_like(flat[: len(flat) // self.group.size])
        work = self.group.reduce_scatter(mine, flat, "mean", async_op=True)
        self.flights.append((number, work, flat, mine))
