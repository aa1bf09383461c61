"""`python -m refimpl.gpu`."""

from refimpl.gpu.check import main

if __name__ == "__main__":
    raise SystemExit(main())
