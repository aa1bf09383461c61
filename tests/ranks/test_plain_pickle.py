"""A machine that has torch and little else: `refimpl.launch` starts ranks there, and says what cannot travel."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HIDE = """
import sys
HIDDEN = {"cloudpickle", "pydantic", "fsrs", "nbval", "jupytext", "hypothesis", "rich", "typer", "pandas", "matplotlib",
          "numpy", "psutil", "safetensors", "hjson", "IPython"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""


def without_packages(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has the standard library, torch and refimpl; so have the ranks that it starts."""
    (folder / "sitecustomize.py").write_text(HIDE)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_ranks_start_and_a_function_of_a_module_travels(tmp_path: Path) -> None:
    done = without_packages(
        tmp_path,
        "from refimpl import launch\n"
        "import torch.distributed as dist\n"
        "print(launch.run(dist.get_world_size, ranks=2, device='cpu'))\n",
    )
    assert done.stdout == "[2, 2]\n", done.stderr


def test_a_closure_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for code in ("dumps(lambda: 1)", "def f():\n    pass\ndumps([f])"):
        done = without_packages(tmp_path, f"from refimpl.ranks.travel import dumps\n{code}\n")
        assert "plain pickle cannot carry it to a rank. Install cloudpickle, or put functions at" in done.stderr


def test_stages_models_and_their_benches_need_torch_alone(tmp_path: Path) -> None:
    modules = ("gpu.check", "zero.zero3", "model.gpt", "comm.ring", "measure.memory", "bench.zero", "bench.comm")
    done = without_packages(tmp_path, "".join(f"import refimpl.{name}\n" for name in modules))
    assert done.returncode == 0, done.stderr
