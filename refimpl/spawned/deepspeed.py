"""What `import deepspeed` finds in a process that multiprocessing spawned, such as a data loader's worker.

It runs the script's file again, under the name `__mp_main__`, and is told the path of modules, but no finder.
"""

import importlib
import sys

from refimpl.as_deepspeed import alias_deepspeed

del sys.modules["deepspeed"]
alias_deepspeed(force=True)
importlib.import_module("deepspeed")  # whoever asked for this module gets what has the name afterwards
