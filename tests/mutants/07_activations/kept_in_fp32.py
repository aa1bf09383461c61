"""What is kept is kept in fp32.

task: KeepResults
says: run's result: wrong values
"""

import torch


class KeepResults(KeepResults):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.keep(func) or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs or {})
        if self.runs > 1:
            self.next += 1
            return self.results[self.next - 1].clone()
        result = func(*args, **kwargs or {})
        self.results.append(result.detach().float().clone())
        return result
