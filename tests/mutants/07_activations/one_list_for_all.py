"""All instances keep their results in one list, of the class.

task: KeepResults
says: the second run, after another's first
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class KeepResults(TorchDispatchMode):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.results = []
        self.runs, self.next = (0, 0)

    def __enter__(self):
        self.runs, self.next = (self.runs + 1, 0)
        super().__enter__()
        return self

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
