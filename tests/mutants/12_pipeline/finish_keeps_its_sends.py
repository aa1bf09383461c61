"""finish waits, and does not let go.

task: Stage
says: after finish() self.sending still holds sends that are over
"""


class Stage(Stage):
    def finish(self):
        for work in self.sending.values():
            work.wait()
