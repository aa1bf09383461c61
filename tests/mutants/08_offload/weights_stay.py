"""The masters are updated, and never given to the model.

task: DelayedUpdate
says: no update arrived
"""


class DelayedUpdate(DelayedUpdate):
    def finish(self):
        if self.under_way is None:
            return
        update, self.under_way = (self.under_way, None)
        update.result()
