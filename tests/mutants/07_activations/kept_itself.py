"""The result itself is kept, which the next operation changes in place.

task: KeepResults
says: the second run's result: what is kept was changed in place
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
            return self.results[self.next - 1].clone()
        result = func(*args, **kwargs or {})
        self.results.append(result)
        return result
