"""Scripts of other people's making, run as they would run them: in processes of their own.

`run_script` is torchrun and `python script.py` themselves. Three processes then import torch, 5 s of CPU time for a
script of 0.1 s, so what is about the script alone is run by `run_on_ranks`.
"""

import os
import subprocess
import sys
from pathlib import Path

from refimpl import as_deepspeed, launch

THREADS = {"OMP_NUM_THREADS": "1"}


def run_python(*arguments: str, path: tuple[Path, ...] = (), expect: int = 0, **environ: str) -> str:
    """python with these arguments; its stdout, or its stderr where it is expected to fail."""
    folders = [*map(str, path), *(p for p in sys.path if p and "deepspeed" not in Path(p).name)]
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | THREADS | {"PYTHONPATH": os.pathsep.join(folders)} | environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stderr if expect else done.stdout


def run_script(text: str, folder: Path, *arguments: str, ranks: int = 1, alias: bool = False, **environ: str) -> str:
    """A script under torchrun (one rank: without), by itself or with refimpl under the name `deepspeed`; its stdout."""
    script = folder / "script.py"
    script.write_text(text)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return run_python(*launcher, *(["-m", "refimpl.as_deepspeed"] if alias else []), str(script), *arguments, **environ)


def run_on_ranks(text: str, folder: Path, *arguments: str, ranks: int = 2) -> str:
    """A script with refimpl under the name `deepspeed`, on new ranks that have joined already; what they printed."""
    script = folder / "script.py"
    script.write_text(text)
    said: list[str] = []
    with launch.World(ranks, device="cpu") as world:
        command = [str(script), *arguments]
        world.call(as_deepspeed.main, command, timeout=240, on_output=lambda rank, stream, text: said.append(text))
    return "".join(said)
