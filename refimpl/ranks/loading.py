"""Imported by the server first: until `frozen` comes, last, nobody looks for garbage.

Modules that are being loaded leave next to none, and looking for it takes a sixth of the server's time to start.
"""

import gc

gc.disable()
