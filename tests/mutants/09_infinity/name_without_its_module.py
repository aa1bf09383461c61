"""Looks at the name and not at the module that it comes from.

task: TensorsOnly
says: was refused after its module had been imported
"""

import pickle

NAMES = ("OrderedDict", "Size", "_rebuild_tensor_v2", "_rebuild_parameter")


class TensorsOnly(pickle.Unpickler):
    def find_class(self, module, name):
        if module.startswith("builtins") or name not in NAMES:
            raise pickle.UnpicklingError(f"refused: {module}.{name}")
        return super().find_class(module, name)
