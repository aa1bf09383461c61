"""An __enter__ that counts, and leaves the mode's own out.

task: KeepResults
says: no operation is seen inside `with`
"""


class KeepResults(KeepResults):
    def __enter__(self):
        self.runs, self.next = self.runs + 1, 0
        return self
