"""`make new-lesson`: what it lays out is a chapter that passes the same checks as the finished ones."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from refimpl.grading import new_lesson
from refimpl.grading.chapters import Chapter, chapters, find_chapter, import_file
from refimpl.grading.grade import Exercise, Grader
from refimpl.grading.stubs import stub, touched
from refimpl.notebook import execute

pytestmark = pytest.mark.xdist_group("grading")

ROOT = Path(__file__).parents[2]
NAME = "07_offload_to_disk"
COPIED = (
    "pyproject.toml",
    "course/ruff.toml",
    "exercises/ruff.toml",
    "solutions/ruff.toml",
    "exercises/conftest.py",
    "solutions/01_collectives.py",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in COPIED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "refimpl").symlink_to(ROOT / "refimpl")  # so that ruff takes imports of it for the project's own
    return tmp_path


@pytest.fixture
def chapter(project: Path) -> Chapter:
    new_lesson.lay_out(NAME, project)
    return find_chapter("07", project)


def contents(project: Path) -> dict[str, str]:
    return {str(path.relative_to(project)): path.read_text() for path in project.rglob("*.*")}


def test_it_has_every_file_of_a_chapter(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    before = contents(project)
    monkeypatch.chdir(project / "solutions")
    monkeypatch.setattr(sys, "argv", ["new_lesson", NAME])
    new_lesson.main()
    made = {
        f"course/{NAME}.py",
        f"solutions/{NAME}.py",
        f"exercises/{NAME}/exercise.py",
        f"exercises/{NAME}/test_{NAME}.py",
        f"tests/mutants/{NAME}/one_mutant.py",
    }
    after = contents(project)
    assert after.keys() - before.keys() == made
    assert {name: after[name] for name in before} == before
    assert set(capsys.readouterr().out.splitlines()[:5]) == made
    for name in made:
        assert not re.search(r"\b(NN|NN_name|NUMBER|TITLE)\b", after[name]), name


def test_its_stub_is_the_solutions(chapter: Chapter):
    assert [c.name for c in chapters(chapter.root)] == ["01_collectives", NAME]
    assert chapter.exercise.read_text() == stub(chapter.solution.read_text())
    assert not touched(chapter)
    assert len(chapter.hints["mean_of_ranks"]) >= 2


def test_its_solution_passes_and_its_mutant_does_not(chapter: Chapter):
    (task,), (mutant,) = chapter.tasks, chapter.mutants
    exercise = getattr(import_file(chapter.grader, chapter.grader.stem), f"test_{task}").exercise
    assert isinstance(exercise, Exercise)
    with Grader() as grader:
        assert grader.grade(exercise, chapter.exercise).outcome == "todo"
        solved = grader.grade(exercise, chapter.solution)
        assert solved.outcome == "pass", solved.text
        killed = grader.grade(exercise, mutant)
    assert killed.outcome == "fail"
    assert f"task: {task}\n" in mutant.read_text()
    (words,) = re.findall(r"(?m)^says: (.+)$", mutant.read_text())
    assert words in killed.text


def test_it_is_formatted_as_everything_else(chapter: Chapter):
    for command in (["check"], ["format", "--check", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=chapter.root,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell()
    shell.colors = "nocolor"
    yield shell
    if "ranks" in shell.user_ns:
        shell.user_ns["ranks"].stop()
    shell.restore_sys_module_state()
    shell.history_manager.end_session()


def test_its_notebook_has_seven_parts_and_runs(
    chapter: Chapter,
    shell: InteractiveShell,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.chdir(chapter.root / "course")
    cells = execute.read(chapter.root / "course" / f"{NAME}.py").cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    parts = "1. The pain", "2. The idea", "3. Build it", "4. Read it", "5. Measure it", "6. Break it", "7. Prove it"
    assert re.findall(r"(?m)^## (.+)$", prose) == list(parts)
    assert prose.startswith("# 7 · Offload to disk")
    for cell in cells:
        if cell.cell_type == "code":
            assert shell.run_cell(cell.source, store_history=True).success
    out = capsys.readouterr().out
    assert "[10.0, 12.0, 14.0, 16.0] | sent: {'all_reduce': 16}" in out
    assert "todo  mean_of_ranks: write its body" in out
    assert sum("predict(" in cell.source for cell in cells) >= 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "'' cannot name a chapter: two digits and words in lower case, such as NAME=17_name"),
        ("offload", "'offload' cannot name a chapter"),
        ("7_offload", "'7_offload' cannot name a chapter"),
        ("07_Offload", "'07_Offload' cannot name a chapter"),
        ("07_off-load", "'07_off-load' cannot name a chapter"),
        ("../07_offload", "'../07_offload' cannot name a chapter"),
        ("07_offload\n", "cannot name a chapter"),
        ("01_collectives", "number 01 is taken by solutions/01_collectives.py: nothing was written"),
        ("01_more", "number 01 is taken by solutions/01_collectives.py"),
    ],
)
def test_what_it_refuses(
    name: str, says: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    before = contents(project)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", ["new_lesson", name])
    with pytest.raises(SystemExit) as left:
        new_lesson.main()
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert contents(project) == before
