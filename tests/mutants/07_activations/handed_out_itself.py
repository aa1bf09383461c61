"""What is kept is handed out itself, and the next operation changes it in place.

task: KeepResults
says: the third run's result
"""

import torch


class KeepResults(KeepResults):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.keep(func) or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs or {})
        if self.runs > 1:
            self.next += 1
            return self.results[self.next - 1]
        result = func(*args, **kwargs or {})
        self.results.append(result.detach().clone())
        return result
