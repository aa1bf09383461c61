"""Allows all of a module in which something innocent stands.

task: TensorsOnly
says: torch._utils._import_dotted_name was handed to the file
"""

import pickle

SAFE = {("collections", "OrderedDict"), ("torch", "Size")}


class TensorsOnly(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) in SAFE or (module == "torch._utils" and "." not in name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"refused: {module}.{name}")
