"""`python -m refimpl` is the `refimpl` command."""

from refimpl.cli.main import main

if __name__ == "__main__":
    main()
