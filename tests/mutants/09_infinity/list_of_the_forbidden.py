"""Forbids what it has heard of; a name with dots leads round it.

task: TensorsOnly
says: the file asked for torch.os.mkdir, and it ran
"""

import pickle


class TensorsOnly(pickle.Unpickler):
    def find_class(self, module, name):
        if module.split(".")[0] in ("os", "posix", "nt", "subprocess", "sys", "builtins", "importlib", "runpy"):
            raise pickle.UnpicklingError(f"{module}.{name} is dangerous")
        return super().find_class(module, name)
