"""Scripts of other people's making, run as they would run them: in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

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
