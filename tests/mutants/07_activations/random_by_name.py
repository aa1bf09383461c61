"""What is random is told by its name.

task: KeepResults
says: a random number drawn after the second run
"""


class KeepResults(KeepResults):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.keep(func) or any(w in str(func) for w in ("dropout", "bernoulli", "rand")):
            return func(*args, **kwargs or {})
        if self.runs > 1:
            self.next += 1
            return self.results[self.next - 1].clone()
        result = func(*args, **kwargs or {})
        self.results.append(result.detach().clone())
        return result
