"""Lay out a new chapter: `make new-lesson NAME=17_name`, or `python -m refimpl.grading.new_lesson 17_name`.

    course/NN_name.py                      the seven beats, what belongs into each, and a cell that runs
    solutions/NN_name.py                   one example task with its hints
    exercises/NN_name/exercise.py          the stub made from it
    exercises/NN_name/test_NN_name.py      its grader
    tests/mutants/NN_name/one_mutant.py    a wrong answer that the grader rejects

Everything runs as it is: replace the example step by step, and the checks stay of use all the way.
"""

import argparse
import re
import sys
from pathlib import Path

from refimpl.grading import lesson
from refimpl.grading.chapters import Chapter, project_folder
from refimpl.grading.stubs import write

NAME = re.compile(r"[0-9]{2}(_[a-z0-9]+)+")
FOLDERS = ("course", "solutions", "exercises", "tests/mutants")
NEXT = """\
Now replace the example; CONTRIBUTING.md says how. `make test` asks for what is still missing:
  course/{name}.ipynb      .venv/bin/python -m refimpl.notebook.execute course/{name}.py
  four more mutants at least, one for each task among them
  a row in exercises/README.md
Cards go into interview_bank/, to the file of their topic."""


def lay_out(name: str, root: Path) -> list[Path]:
    """Write the files of chapter `name` below `root`; returns them. ValueError: a bad name, or its number is taken."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a chapter: two digits and words in lower case, such as NAME=17_name")
    number = name[:2]
    taken = [path for folder in FOLDERS for path in sorted((root / folder).glob(f"{number}_*"))]
    if taken:
        raise ValueError(f"number {number} is taken by {taken[0].relative_to(root)}: nothing was written")
    chapter = Chapter(name, root)
    files = {
        root / "course" / f"{name}.py": lesson.COURSE,
        chapter.solution: lesson.SOLUTION,
        chapter.grader: lesson.GRADER,
        root / "tests" / "mutants" / name / "one_mutant.py": lesson.MUTANT,
    }
    for path, template in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fill(template, name), encoding="utf-8")
    write(chapter)
    return [*files, chapter.exercise]


def fill(template: str, name: str) -> str:
    """The template with the chapter's name, number and title in place."""
    number, _, words = name.partition("_")
    title = words.replace("_", " ").capitalize()
    for mark, text in (("NN_name", name), ("NN", number), ("NUMBER", str(int(number))), ("TITLE", title)):
        template = re.sub(rf"\b{mark}\b", text, template)
    return template


def main() -> None:
    parser = argparse.ArgumentParser(prog="new-lesson", description="Lay out a new chapter.")
    parser.add_argument("name", metavar="NN_name", help="two digits and words in lower case, such as 17_name")
    name = parser.parse_args().name
    try:
        root = project_folder()
        files = lay_out(name, root)
    except (ValueError, FileNotFoundError) as reason:
        print(f"new-lesson: {reason}", file=sys.stderr)
        raise SystemExit(2) from None
    for path in files:
        print(path.relative_to(root))
    print(NEXT.format(name=name))


if __name__ == "__main__":
    main()
