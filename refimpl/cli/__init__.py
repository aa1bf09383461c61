"""The `refimpl` command line."""
