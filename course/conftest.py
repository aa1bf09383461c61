"""pytest --nbval compares what cells show at their end: what they showed on the way is left out."""

import os

os.environ["REFIMPL_STREAM"] = "0"  # kernels inherit it
