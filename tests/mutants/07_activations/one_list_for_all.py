"""All instances keep their results in one list, of the class.

task: KeepResults
says: the second run, after another's first
"""

import torch


class KeepResults(KeepResults):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.keep(func) or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs or {})
        if self.runs > 1:
            self.next += 1
            return type(self).ALL[self.next - 1].clone()
        result = func(*args, **kwargs or {})
        type(self).ALL = [*getattr(type(self), "ALL", [])[: len(self.results)], result.detach().clone()]
        self.results.append(None)
        return result
