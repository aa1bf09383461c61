"""A kept operation loses its keyword arguments.

task: KeepResults
says: keyword `alpha` is lost
"""

import torch


class KeepResults(KeepResults):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.keep(func) or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs or {})
        if self.runs > 1:
            self.next += 1
            return self.results[self.next - 1].clone()
        result = func(*args)
        self.results.append(result.detach().clone())
        return result
