"""Make a chapter's notebook from its source: `python -m refimpl.notebook.execute course/00_start.py`.

The source is a Python file in the percent format (https://jupytext.readthedocs.io): people review that. The notebook
beside it has the same cells, run from top to bottom, with their outputs. Running it again changes no byte: a cell's id
comes from its content, nothing in the file tells the time, and cells whose outputs do (tag `nbval-ignore-output`) keep
those they have, as long as no code of the chapter has changed. `--fresh` measures them anew. A cell tagged `hide-input`
is folded, here and on the site: what it shows stays, its code opens with a click.
"""

import argparse
import hashlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jupytext  # type: ignore[import-untyped]
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

TIMED, FOLDED = "nbval-ignore-output", "hide-input"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read(source: Path) -> Any:
    """The notebook that a percent-format file describes, without outputs."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(_METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type} {cell.source}".encode()).hexdigest()[:8]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        if FOLDED in cell.metadata.get("tags", []):
            cell.metadata["jupyter"] = nbformat.from_dict({"source_hidden": True})  # what JupyterLab reads
    return notebook


def execute(source: Path, timeout: int = 120) -> Any:
    """The notebook with its outputs. CellExecutionError if a cell fails that is not tagged `raises-exception`."""
    notebook = read(source)
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(source.parent)}},
    ).execute()
    notebook.metadata = nbformat.from_dict(_METADATA)
    drop_widgets(notebook)
    return notebook


def drop_widgets(notebook: Any) -> None:
    """Keep a widget's text form alone: the view is a random id, and of no use without its kernel."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)


def keep_timed_outputs(old: Any, new: Any) -> None:
    """Give new's timed cells the outputs they have in old, if both notebooks have the same code."""
    code_of_old, code_of_new = ([cell for cell in nb.cells if cell.cell_type == "code"] for nb in (old, new))
    if [cell.source for cell in code_of_old] == [cell.source for cell in code_of_new]:
        for before, after in zip(code_of_old, code_of_new, strict=True):
            if TIMED in after.metadata.get("tags", []):
                after.outputs = before.outputs


def make(source: Path, fresh: bool = False) -> Path:
    """Write the notebook beside its source."""
    notebook, target = execute(source), source.with_suffix(".ipynb")
    if target.exists() and not fresh:
        keep_timed_outputs(nbformat.read(target, 4), notebook)
    nbformat.write(notebook, target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m refimpl.notebook.execute", description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path, metavar="course/NN_name.py")
    parser.add_argument("--fresh", action="store_true", help="measure timed cells anew")
    options = parser.parse_args()
    for source in options.sources:
        try:
            print(make(source, options.fresh), flush=True)
        except CellExecutionError as error:
            sys.exit(f"{source}: a cell failed, so no notebook was written\n{error}")


if __name__ == "__main__":
    main()
