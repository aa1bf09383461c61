"""A stack in place of a queue: the newest is waited for.

task: InFlight
says: waits for one that was launched later
"""


class InFlight(InFlight):
    def settle(self):
        number, work, _, mine = self.flights.pop()
        work.wait()
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine
