"""Chapters ask before they tell: predictions, and tasks to be written in the notebook, which begin as the stub does.

The code of a prediction holds its answer, so it is folded.
"""

import ast
import re
from pathlib import Path

import pytest

from refimpl.grading.chapters import definitions, find_chapter
from refimpl.grading.live import segment
from refimpl.grading.stubs import stub
from refimpl.notebook import execute

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "course").glob("[0-9][0-9]_*.py"))
TASK = re.compile(r"^# %%task (\S+) (\S+)\n(.*?)^# %%", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_asks_at_least_four_times(path: Path) -> None:
    asked = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert sum(getattr(call.func, "id", "") == "predict" for call in asked) >= 4


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_answer_of_a_prediction_is_folded(path: Path) -> None:
    asked = [cell for cell in execute.read(path).cells if re.search(r"(?m)^predict\(", cell.source)]
    assert asked
    assert [cell.source for cell in asked if execute.FOLDED not in cell.metadata.get("tags", [])] == []


@pytest.mark.parametrize("path", CHAPTERS[1:], ids=lambda path: path.stem)
def test_a_chapter_has_a_task_that_is_its_exercises_stub(path: Path) -> None:
    cells = TASK.findall(path.read_text())
    assert cells
    for name, task, cell in cells:
        source = stub(find_chapter(name, ROOT).solution.read_text())
        expected = next(d for d in definitions(ast.parse(source)) if d.name == task)
        assert name == path.stem
        assert cell.strip() == segment(source, expected)  # its decorators too


def printed(cell: str) -> set[str]:
    """What a cell shows the code of: its own definitions, and what `show.source` prints."""
    tree = ast.parse("\n".join(line for line in cell.splitlines() if not line.startswith("%")))
    made = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "show.source"]
    names = [
        ast.unparse(arg).split(".") for call in calls for arg in call.args
    ]  # a class's method, or a module's function
    return made | {words[0] for words in names} | {words[-1] for words in names if words[0].islower()}


@pytest.mark.parametrize("path", CHAPTERS[1:], ids=lambda path: path.stem)
def test_no_cell_prints_what_a_task_asks_for(path: Path) -> None:
    tasks = set(find_chapter(path.stem, ROOT).tasks)
    cells = [cell.source for cell in execute.read(path).cells if cell.cell_type == "code"]
    assert {name for cell in cells if not cell.startswith("%%task") for name in printed(cell) & tasks} == set()
