"""One task at once: what a change concerns, what a cell writes into a file, and the verdict."""

from collections.abc import Callable
from pathlib import Path

import pytest

from refimpl.grading.chapters import Chapter, project_folder
from refimpl.grading.grade import Grader
from refimpl.grading.live import Live, changed_tasks, try_outs, write_into
from refimpl.grading.progress import Progress, bar
from refimpl.grading.verdict import Verdict

FILE = '''"""A chapter."""

import torch


def helper(x):
    return x


def first(x):
    """What to do."""
    raise NotImplementedError("first")


def second(x):
    raise NotImplementedError("second")
'''


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('raise NotImplementedError("second")', "return 2", ["second"]),
        ("return x", "return x + 1", ["first", "second"]),
        ("import torch", "import torch  # the library", []),
        ("import torch", "import torch\nimport math", ["first", "second"]),
    ],
)
def test_what_a_change_concerns(old: str, new: str, expected: list[str]) -> None:
    assert changed_tasks(FILE, FILE.replace(old, new), ["first", "second"]) == expected
    assert changed_tasks("def (", FILE, ["first", "second"]) == ["first", "second"]
    with pytest.raises(SyntaxError):
        changed_tasks(FILE, "def (", ["first"])


def test_a_cell_replaces_what_it_defines_and_adds_the_rest() -> None:
    cell = "import math\nimport torch\n\ndef mine(x):\n    return x\n\ndef first(x):\n    return math.sin(mine(x))\n"
    after = write_into(FILE, cell, "first")
    names: dict[str, object] = {}
    exec(after, names)
    assert names["first"](0.5) == pytest.approx(0.479, abs=1e-3)  # type: ignore[operator]
    assert after.count("import torch") == 1
    assert 'NotImplementedError("second")' in after
    assert write_into(after, cell, "first") == after, "the same cell once more changes nothing"
    again = write_into(after, "def first(x):\n    return 1\n", "first")
    assert "math.sin" not in again
    assert "def mine" in again


def test_a_cell_replaces_two_definitions_of_other_lengths() -> None:
    cell = "def first():\n    a = 1\n    b = 2\n    return a + b\n\ndef second():\n    return 2\n"
    names: dict[str, Callable[[], int]] = {}
    exec(write_into(FILE, cell, "first"), names)
    assert (names["first"](), names["second"]()) == (3, 2)


def test_of_two_definitions_of_a_name_the_last_counts() -> None:
    cell = "def first():\n    return 0\n\n\ndef mine():\n    return 1\n\n\ndef first():\n    return mine() + 1\n"
    names: dict[str, Callable[[], int]] = {}
    exec(write_into(FILE, cell, "first"), names)
    assert names["first"]() == 2


def test_what_only_tries_the_task_is_left_out() -> None:
    cell = """torch.manual_seed(0)
def first(x):
    return helper(x) * FACTOR
def helper(x):
    return x
FACTOR = 3
print(first(1))
assert helper(2) == 2
for x in range(3):
    first(x)
got = first(2)
"""
    assert [line for line, _ in try_outs(cell, "first")] == [7, 8, 9, 11]
    after = write_into(FILE, cell, "first")
    names: dict[str, Callable[[int], int]] = {}
    exec(after, names)
    assert names["first"](2) == 6
    assert "manual_seed" in after
    assert "print" not in after
    assert "got" not in after


def test_a_cell_brings_a_task_that_the_file_lost() -> None:
    assert "def third" in write_into(FILE, "def third():\n    return 3\n", "third")


def test_a_cell_without_the_task_is_refused() -> None:
    with pytest.raises(ValueError, match="defines other, not first"):
        write_into(FILE, "def other():\n    pass\n", "first")
    with pytest.raises(SyntaxError):
        write_into(FILE, "def first(:\n", "first")


def test_what_was_passed_stays_passed_and_a_damaged_file_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress, key = Progress.load(tmp_path), ("01_one", "double")
    progress.record({key: Verdict("double", "pass")})
    progress.record({key: Verdict("double", "fail", "wrong\nmore")})
    entry = Progress.load(tmp_path).entry(*key)
    assert (entry.outcome, entry.headline, entry.passed) == ("fail", "wrong", True)
    progress.path.write_text("[1]")
    assert not Progress.load(tmp_path).entries
    assert "it is kept as" in capsys.readouterr().err
    assert (bar(0, 0, 4), bar(1, 2, 4), bar(2, 2, 4)) == ("[....]", "[##..]", "[####]")


def test_a_solution_passes_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIMPL_DATA", str(tmp_path))
    chapter = Chapter("01_collectives", project_folder())
    with Grader() as grader:
        live = Live(chapter, grader)
        assert list(live.exercises) == chapter.tasks
        assert live.grade("ring_all_gather", chapter.solution).outcome == "pass"
        assert sorted(grader.worlds) == [2, 3, 4], "they wait for the next answer"
    assert "ring_all_gather" in (tmp_path / "exercises.json").read_text()
