"""From the third run on what is kept is handed out itself.

task: KeepResults
says: the fourth run's result: what is kept was changed in place
"""

import torch


class KeepResults(KeepResults):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.keep(func) or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs or {})
        if self.runs > 1:
            self.next += 1
            r = self.results[self.next - 1]
            return r.clone() if self.runs == 2 else r
        result = func(*args, **kwargs or {})
        self.results.append(result.detach().clone())
        return result
