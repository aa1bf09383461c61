"""What arrives replaces the shard of the micro-batch before.

task: InFlight
says: only the launch that came last is there
"""


class InFlight(InFlight):
    def settle(self):
        number, work, _, mine = self.flights.popleft()
        work.wait()
        self.shards[number] = mine
