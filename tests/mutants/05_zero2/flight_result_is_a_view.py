"""The result is written into the buffer, and keeps all of it alive.

task: InFlight
says: is a view
"""


class InFlight(InFlight):
    def launch(self, number, flat):
        if len(self.flights) == self.most:
            self.settle()
        mine = flat.view(self.group.size, -1)[self.group.rank]
        work = self.group.reduce_scatter(mine, flat, "mean", async_op=True)
        self.flights.append((number, work, flat, mine))
