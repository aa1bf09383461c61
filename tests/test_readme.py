"""What the README shows is what there is: its script runs, its map is the tree."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_training_script_runs(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "range(100)" in script
    (tmp_path / "train.py").write_text(script.replace("range(100)", "range(2)"), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_two_lines_are_more_than_one_process_needs() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert script.count("#+ ") == 2
    for line in ("loss.backward()", "optimizer.step()", "optimizer.zero_grad()"):
        assert f"    {line}" in script


def test_its_map_names_every_folder() -> None:
    folders = {p.name for p in (ROOT / "refimpl").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    (floors,) = re.findall(r"```\n(floor 4.*?)```", README, re.DOTALL)
    assert set(re.findall(r"(\w+)/ ", floors)) == folders


def test_imports_go_down_the_floors() -> None:
    """A module imports from lower floors or its own folder only."""
    floors = [
        {"comm", "measure", "ranks", "launch"},
        {"model", "optim"},
        {"zero", "plan"},
        {"engine"},
    ]
    level = {name: number for number, names in enumerate(floors) for name in names}
    wrong = []
    for file in (ROOT / "refimpl").rglob("*.py"):
        here = file.relative_to(ROOT / "refimpl").parts[0].removesuffix(".py")
        if here not in level:
            continue
        for name in re.findall(r"^\s*(?:from|import) refimpl\.(\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            allowed = name == here or level.get(name, 4) < level[here] or {name, here} <= floors[0]
            if not allowed:
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert wrong == []
