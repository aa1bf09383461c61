"""Where the driver's library is. Triton links what launches its kernels with it, and looks in ldconfig's list, then in
LD_LIBRARY_PATH; torch finds it wherever the loader does, which in a container may be a folder that nobody listed.
"""

from contextlib import suppress
from pathlib import Path

VARIABLE = "TRITON_LIBCUDA_PATH"  # a folder that Triton then takes


def loaded() -> str:
    """The folder from which this process has loaded it; "" if it has not."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/libcuda.so" in line:
                return str(Path(line[line.index("/") :]).parent)
    return ""


def missed() -> str:
    """... if Triton would not find it there by itself; else ""."""
    folder = loaded()
    if folder:
        try:
            from triton.backends.nvidia.driver import libcuda_dirs

            libcuda_dirs()
        except ImportError:  # no Triton, or one that looks elsewhere
            return ""
        except Exception:  # an assertion, or no ldconfig to be asked
            return folder
    return ""
