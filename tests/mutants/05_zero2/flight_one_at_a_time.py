"""Never more than one, whatever is allowed.

task: InFlight
says: launch waits although there is room
"""

import torch


class InFlight(InFlight):
    def launch(self, number, flat):
        if self.flights:
            self.settle()
        mine = torch.empty_like(flat[: len(flat) // self.group.size])
        work = self.group.reduce_scatter(mine, flat, "mean", async_op=True)
        self.flights.append((number, work, flat, mine))
