"""Each chapter's notebook is the one that its source makes: same cells, same ids, run once from top to bottom.

That its outputs are still what the code prints is checked by nbval, in `make test`.
"""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from refimpl.notebook import execute

COURSE = Path(__file__).parents[2] / "course"
CHAPTERS = sorted(COURSE.glob("[0-9]*.py"))
EXPECTED_TO_FAIL = "raises-exception"


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def chapter(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A chapter's source, and its notebook."""
    source: Path = request.param
    return execute.read(source), nbformat.read(source.with_suffix(".ipynb"), 4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_chapters_and_no_notebook_without_a_source():
    assert CHAPTERS
    assert {path.stem for path in COURSE.glob("*.ipynb")} == {path.stem for path in CHAPTERS}


def test_the_notebook_has_the_cells_of_its_source(chapter: tuple[Any, Any]):
    source, notebook = chapter

    def cells(nb: Any) -> list[tuple[str, str, str, dict[str, Any]]]:
        return [(cell.id, cell.cell_type, cell.source, dict(cell.metadata)) for cell in nb.cells]

    remedy = "the source is newer: run python -m refimpl.notebook.execute on it"
    assert cells(notebook) == cells(source), remedy
    assert notebook.metadata == source.metadata
    nbformat.validate(notebook)


def test_the_notebook_ran_once_from_top_to_bottom(chapter: tuple[Any, Any]):
    _, notebook = chapter
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert any(cell.outputs for cell in code(notebook))
    for cell in code(notebook):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == (EXPECTED_TO_FAIL in cell.metadata.get("tags", [])), cell.source


def test_no_output_names_a_path_or_a_traceback(chapter: tuple[Any, Any]):
    for cell in code(chapter[1]):
        for output in cell.outputs:
            texts = [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
            for text in [output.get("text", ""), *texts, *output.get("traceback", [])]:
                assert not any(sign in text for sign in ("Traceback", "/home/", "/tmp/", "site-packages")), cell.source
