"""Answers as learners hand them in by accident, as text, with the exercise that they are graded by."""

import functools
from pathlib import Path

from refimpl.grading.grade import Exercise, Grader, Verdict


def check_double(answer: object, group: object) -> None:
    import torch

    from refimpl.grading.compare import equal
    from refimpl.grading.rank import case

    case("x = [1, 2]")
    equal(answer.double(group, torch.tensor([1.0, 2.0])), torch.tensor([2.0, 4.0]), "the result")  # type: ignore[attr-defined]


EXERCISE = Exercise("double", check_double, ranks=(2,), timeout=3)


@functools.cache
def grader() -> Grader:
    return Grader()


def graded(folder: Path, body: str, head: str = "import torch") -> Verdict:
    """The verdict on `double(group, x)` with this body."""
    file = folder / "exercise.py"
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    file.write_text(f"{head}\n\n\ndef double(group, x):\n{indented}\n")
    return grader().grade(EXERCISE, file)
