"""Names are compared without regard to upper and lower case.

task: TensorsOnly
says: torch.size was handed to the file
"""

import pickle
from collections import OrderedDict

import torch


class TensorsOnly(pickle.Unpickler):
    def find_class(self, module, name):
        allowed = {
            "collections.ordereddict": OrderedDict,
            "torch.size": torch.Size,
            "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
            "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
        }
        found = allowed.get(f"{module}.{name}".lower())
        if found is None:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which is not allowed")
        return found
