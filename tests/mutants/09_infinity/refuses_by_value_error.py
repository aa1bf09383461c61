"""What is refused raises a ValueError.

task: TensorsOnly
says: ValueError is raised
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
        if f"{module}.{name}" not in allowed:
            raise ValueError(f"the file asks for {module}.{name}, which is not allowed")
        return allowed[f"{module}.{name}"]
