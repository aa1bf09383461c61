"""`python -m refimpl.gpu`."""

import time

if __name__ == "__main__":
    begun = time.monotonic()  # before torch is imported, whose libraries are gigabytes
    from refimpl.gpu.check import main

    raise SystemExit(main(begun=begun))
