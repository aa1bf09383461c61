"""Everything is sent in finish(), when backward is over.

task: Ddp
says: no overlap: nothing is sent before the last gradient
"""


class Ddp(Ddp):
    def on_gradient(self, p):
        if not self.syncing:
            return
        self.ready.add(p)
