"""What the README shows is what there is: its script runs."""

import re
import subprocess
import sys
from pathlib import Path

from refimpl.bank.load import load
from refimpl.grading.chapters import find_chapter
from refimpl.plan.public import FAMILIES

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


def test_its_tables_count_what_is_there() -> None:
    shown = re.findall(r"\[(\d+) tasks\]\(exercises/(\w+)\)", README)
    assert {name: int(count) for count, name in shown} == {
        path.parent.name: len(find_chapter(path.parent.name, ROOT).tasks)
        for path in (ROOT / "exercises").glob("*/exercise.py")
    }
    assert f" {len(load())} cards," in README


def test_what_can_be_lifted_counts_the_families_it_plans() -> None:
    lift = (ROOT / "docs" / "lift.md").read_text(encoding="utf-8")
    assert f" one of {len(FAMILIES)} families of transformers" in " ".join(lift.split())
