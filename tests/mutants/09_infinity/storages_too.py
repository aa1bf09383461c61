"""Names of torch's storages are allowed, which torch.load asks for itself.

task: TensorsOnly
says: was handed to the file
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
            "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
        }
        if module == "torch" and name.endswith("Storage"):
            return getattr(torch, name)
        if f"{module}.{name}" not in allowed:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which is not allowed")
        return allowed[f"{module}.{name}"]
