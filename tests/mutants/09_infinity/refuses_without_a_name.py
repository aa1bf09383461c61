"""Says that something is wrong, not what.

task: TensorsOnly
says: the refusal does not say which name was asked for
"""

import pickle
from collections import OrderedDict

import torch

ALLOWED = {
    "OrderedDict": OrderedDict,
    "Size": torch.Size,
    "_rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "_rebuild_parameter": torch._utils._rebuild_parameter,
}


class TensorsOnly(pickle.Unpickler):
    def find_class(self, module, name):
        if module not in ("collections", "torch", "torch._utils") or name not in ALLOWED:
            raise pickle.UnpicklingError("this file is not safe")
        return ALLOWED[name]
