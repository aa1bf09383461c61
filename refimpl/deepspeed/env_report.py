"""`ds_report`: what runs here, in three lines; `refimpl doctor` says more. DeepSpeed: deepspeed/env_report.py."""

import platform

import torch

from refimpl.as_deepspeed import VERSION
from refimpl.deepspeed.accelerator import get_accelerator


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print it; there are no operators, errors or warnings to hide."""
    print(f"deepspeed {VERSION}: refimpl in its place, no operators to build")
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print(f"accelerator {get_accelerator().device_name()}")


if __name__ == "__main__":
    main()
