"""The runner: the same source gives the same bytes."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

from refimpl.notebook import execute

SOURCE = """\
# %% [markdown]
# # A chapter

# %%
import sys
print("out")
print("more")
print("err", file=sys.stderr)

# %% tags=["nbval-ignore-output"]
import time
time.time_ns()

# %%
1 + 1

# %%
1 + 1
"""


def outputs(notebook: Any) -> list[Any]:
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def test_a_notebook_is_the_same_bytes_on_each_run(tmp_path: Path):
    source = tmp_path / "00_a.py"
    source.write_text(SOURCE)
    target = execute.make(source)
    first = target.read_bytes()
    assert execute.make(source).read_bytes() == first
    assert execute.make(source, fresh=True).read_bytes() != first
    notebook = nbformat.read(target, 4)
    nbformat.validate(notebook)
    assert [o.text for o in outputs(notebook)[0]] == ["out\nmore\n", "err\n"]
    assert outputs(notebook)[2][0].data["text/plain"] == "2"
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in execute.read(source).cells]
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert "execution" not in target.read_text().replace("execution_count", "")


def test_a_tag_folds_the_code_of_a_cell(tmp_path: Path):
    source = tmp_path / "a.py"
    source.write_text('# %% tags=["hide-input"]\n1\n\n# %%\n2\n')
    folded, open_ = execute.read(source).cells
    assert folded.metadata["jupyter"] == {"source_hidden": True}
    assert "jupyter" not in open_.metadata


def test_timed_outputs_are_kept_only_while_the_code_is_the_same(tmp_path: Path):
    source = tmp_path / "a.py"
    source.write_text(SOURCE)
    old, new, other = (execute.read(source) for _ in range(3))
    for notebook, value in ((old, "old"), (new, "new"), (other, "new")):
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [value]
    execute.keep_timed_outputs(old, new)
    assert outputs(new) == [["new"], ["old"], ["new"], ["new"]]
    other.cells[-1].source = "2"
    execute.keep_timed_outputs(old, other)
    assert outputs(other) == [["new"]] * 4


def test_a_failing_cell_writes_no_notebook(tmp_path: Path):
    source = tmp_path / "a.py"
    source.write_text("# %%\n1 / 0\n")
    done = subprocess.run(
        [sys.executable, "-m", "refimpl.notebook.execute", str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.search(r"a\.py: a cell failed, so no notebook was written", done.stderr)
    assert "ZeroDivisionError" in done.stderr
    assert not source.with_suffix(".ipynb").exists()
