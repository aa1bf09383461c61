"""`%%task` in a shell: what it writes, what it says, what it keeps."""

import inspect
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from refimpl.grading.chapters import import_file, project_folder
from refimpl.grading.stubs import stub

Cell = Callable[..., Any]
NAME = "01_collectives"
SOLUTION = project_folder() / "solutions" / f"{NAME}.py"
ANSWER = "def ring_all_gather(group, x):\n    return x.repeat(group.size)\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A learner's folder, with stubs."""
    root = tmp_path / "course"
    (root / "solutions").mkdir(parents=True)
    folder = root / "exercises" / NAME
    folder.mkdir(parents=True)
    shutil.copy(SOLUTION, root / "solutions")
    shutil.copy(project_folder() / "exercises" / NAME / f"test_{NAME}.py", folder)
    (folder / "exercise.py").write_text(stub(SOLUTION.read_text()))
    monkeypatch.chdir(root)
    monkeypatch.setenv("REFIMPL_DATA", str(tmp_path))
    monkeypatch.setenv("REFIMPL_DEVICE", "cpu")  # loading the extension would leave it so
    return folder


@pytest.fixture
def cell(project: Path) -> Iterator[Cell]:
    shell = InteractiveShell()
    shell.colors = "nocolor"
    shell.extension_manager.load_extension("refimpl.notebook")
    yield lambda line, body: shell.run_cell(f"%%task {line}\n{body}", store_history=True)
    shell.restore_sys_module_state()
    assert shell.history_manager is not None
    shell.history_manager.end_session()


def test_an_answer_is_saved_graded_and_can_be_mended(
    cell: Cell, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cell(f"{NAME} ring_all_gather", ANSWER).success
    out = capsys.readouterr().out
    assert out.startswith("fail  ")
    assert "every chunk is your own" in out
    assert f"%hint {NAME} ring_all_gather" in out
    right = inspect.getsource(import_file(SOLUTION, "solution").ring_all_gather)
    cell(f"{NAME[:2]} ring_all_gather", right)
    assert capsys.readouterr().out == "pass  ring_all_gather\n"
    text = (project / "exercise.py").read_text()
    assert right.strip() in text
    assert 'NotImplementedError("ring_reduce_scatter")' in text
    assert not list(project.glob("exercise.kept-*")), "its own answer is replaced, not kept"


def test_the_stub_above_the_answer_does_no_harm(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    above = 'def ring_all_gather(group, x):\n    raise NotImplementedError("ring_all_gather")\n\n\n'
    cell(f"{NAME} ring_all_gather", above + ANSWER)
    assert "every chunk is your own" in capsys.readouterr().out


def test_what_only_tries_an_answer_is_not_saved(cell: Cell, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would run with each import of the file, above the answer, and every task of the chapter would fail by it."""
    cell(f"{NAME} ring_all_gather", f"{ANSWER}print(ring_all_gather)\n")
    out = capsys.readouterr().out
    assert out.startswith("line 4 is not saved, as it only tries the answer (do so in a cell of its own): print(ring")
    assert "every chunk is your own" in out
    assert "print(" not in (project / "exercise.py").read_text()


def test_a_stub_saves_nothing(cell: Cell, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (project / "exercise.py").read_text()
    cell(NAME + " ring_all_gather", "def ring_all_gather(group, x):\n    raise NotImplementedError\n")
    assert capsys.readouterr().out.startswith("todo  ring_all_gather: write its body")
    assert (project / "exercise.py").read_text() == before


def test_an_answer_from_elsewhere_is_kept(cell: Cell, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = (project / "exercise.py").read_text().replace('raise NotImplementedError("ring_all_gather")', "return x")
    (project / "exercise.py").write_text(theirs)
    cell(f"{NAME} ring_all_gather", ANSWER)
    assert "exercise.kept-1.py keeps the answer" in capsys.readouterr().out
    assert (project / "exercise.kept-1.py").read_text() == theirs


@pytest.mark.parametrize(
    ("line", "body", "says"),
    [
        (NAME, ANSWER, "needs a chapter and a task"),
        ("99_none ring", ANSWER, "no chapter '99_none'"),
        (f"{NAME} ring", ANSWER, "has no task 'ring'"),
        (f"{NAME} ring_all_gather", "def ring_all_gather(:\n", "line 2 is not Python"),
        (f"{NAME} ring_all_gather", "x = 1\n", "defines nothing, not ring_all_gather"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(cell: Cell, line: str, body: str, says: str) -> None:
    error = cell(line, body).error_in_exec
    assert says in str(error)
    assert "\n" not in str(error).strip()
