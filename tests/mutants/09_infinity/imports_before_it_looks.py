"""Finds the object first, and then compares it with those that are allowed.

task: TensorsOnly
says: was refused after its module had been imported
"""

import pickle
from collections import OrderedDict

import torch
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2

ALLOWED = (OrderedDict, torch.Size, _rebuild_tensor_v2, _rebuild_parameter)


class TensorsOnly(pickle.Unpickler):
    def find_class(self, module, name):
        try:
            found = super().find_class(module, name)
        except AttributeError:
            found = None
        if not any(found is each for each in ALLOWED):
            raise pickle.UnpicklingError(f"refused: {module}.{name}")
        return found
