"""Names are compared by their beginnings.

task: TensorsOnly
says: collections.OrderedDict.fromkeys was handed
"""

import pickle


class TensorsOnly(pickle.Unpickler):
    def find_class(self, module, name):
        full = f"{module}.{name}"
        if not full.startswith(
            (
                "collections.OrderedDict",
                "torch.Size",
                "torch._utils._rebuild_tensor_v2",
                "torch._utils._rebuild_parameter",
            )
        ):
            raise pickle.UnpicklingError(f"{full} is not allowed")
        return super().find_class(module, name)
