"""What CONTRIBUTING.md and exercises/README.md name is there."""

import re
from pathlib import Path

from refimpl.grading.chapters import chapters

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXERCISES = (ROOT / "exercises" / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_target_that_is_named_exists_and_is_explained() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", MAKEFILE))
    explained = set(re.findall(r'echo "make ([a-z-]+)', MAKEFILE))
    assert set(re.findall(r"`make ([a-z-]+)", GUIDE)) <= targets
    assert explained <= targets
    assert targets - explained == {"help", "install"}


def test_every_path_that_is_named_exists() -> None:
    names = re.findall(r"`([\w./]+(?:/|\.(?:py|md)))`", GUIDE)
    assert len(names) > 15
    made = {"site/"}
    assert [n for n in names if "NN_name" not in n and n not in made and not (ROOT / n).exists()] == []


def test_every_word_of_the_code_that_is_named_exists() -> None:
    for file, words in {
        "refimpl/plan/formulas.py": ("Strategy", "STRATEGIES", "memory_bytes", "traffic"),
        "tests/zero/training.py": ("STAGES",),
        "refimpl/engine/build.py": ("STAGES",),
        "refimpl/cli/train.py": ("STAGES",),
        "tests/compress/operators.py": ("OPERATORS",),
        "tests/zero/test_compressed.py": ("KINDS",),
        "refimpl/engine/configuration/compression.py": ("OF",),
        "refimpl/bench/methods.py": ("METHODS",),
    }.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert file in GUIDE
        for word in words:
            assert f"`{word}`" in GUIDE
            assert re.search(rf"(?m)^(def )?{word}\b", text), f"{file} has no {word}"


def test_the_table_of_exercises_has_every_task() -> None:
    rows = {
        name: re.findall(r"`(\w+)`", tasks) for name, tasks in re.findall(r"(?m)^\| `(\w+)` \| (.+) \|$", EXERCISES)
    }
    assert rows == {chapter.name: chapter.tasks for chapter in chapters(ROOT)}


def test_the_quick_tests_are_some_of_every_folder() -> None:
    (quick,) = re.findall(r"(?m)^QUICK := ((?:.*\\\n)*.*)$", MAKEFILE)
    patterns = [path.partition("::")[0] for path in re.findall(r"tests/[\w/.*:]+", quick)]
    files = [file for pattern in patterns for file in ROOT.glob(pattern)]
    assert all(any(ROOT.glob(pattern)) for pattern in patterns)
    folders = {file.parent for file in (ROOT / "tests").rglob("test_*.py")}
    assert folders - {file if file.is_dir() else file.parent for file in files} == set()
