"""A frozen parameter is read as one that is trained.

task: TensorsOnly
says: a parameter that was frozen has requires_grad = True
"""

import pickle
from collections import OrderedDict

import torch


class TensorsOnly(pickle.Unpickler):
    def find_class(self, module, name):
        allowed = {
            "collections.OrderedDict": OrderedDict,
            "torch.Size": torch.Size,
            "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
            "torch._utils._rebuild_parameter": lambda data, requires_grad, hooks: torch.nn.Parameter(data),
        }
        if f"{module}.{name}" not in allowed:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which is not allowed")
        return allowed[f"{module}.{name}"]
