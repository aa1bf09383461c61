"""The exercises: each task from its solution's docstrings, hints and the solution folded."""

import ast
import textwrap

from pages.markdown import fence, folded, title
from refimpl.grading.chapters import Chapter, Def, definitions

INTRODUCTION = """\
# Exercises

Write the functions of a chapter in its `exercise.py`, then let the grader look:

```bash
pytest exercises/01_collectives                     # grade one chapter
refimpl hint 01_collectives ring_reduce_scatter     # one hint more each time
refimpl progress                                    # where you stand, and what to try next
```

The grader runs your code, on 2, 3 and 4 ranks where it communicates. A failure names the first thing that differs
(step, rank, parameter) and shows the collectives that ran beside those expected. Here each task stands with its hints
and its solution folded.

| chapter | tasks |
| --- | --- |
"""


def index(chapters: list[Chapter]) -> str:
    """The page that lists all exercises."""
    rows = []
    for chapter in chapters:
        links = ", ".join(f"[`{task}`]({chapter.name}.md#{task})" for task in chapter.tasks)
        rows.append(f"| [{title(chapter.name)}]({chapter.name}.md) | {links} |")
    return INTRODUCTION + "\n".join(rows) + "\n"


def page(chapter: Chapter) -> str:
    """One chapter's page, from its solution file."""
    source = chapter.solution.read_text("utf-8")
    tree = ast.parse(source)
    parts = [
        f"# {title(chapter.name)}",
        f"Your file: `exercises/{chapter.name}/exercise.py`",
        ast.get_docstring(tree) or "",
    ]
    for task in definitions(tree):
        if task.name in chapter.tasks:
            parts += _task(task, source.splitlines(), chapter.hints.get(task.name, []))
    return "\n\n".join(parts) + "\n"


def _task(task: Def, lines: list[str], hints: list[str]) -> list[str]:
    parts = [f"## {task.name} {{ #{task.name} }}", ast.get_docstring(task) or "", fence(stub(task, lines), "python")]
    if hints:
        parts.append(folded("answer", "Hints", "\n".join(f"1. {hint}" for hint in hints)))
    parts.append(folded("answer", "Solution", fence(without_docstring(task, lines), "python")))
    return parts


def stub(task: Def, lines: list[str]) -> str:
    """What is to be written: the signature, and a class's methods with their docstrings."""
    if isinstance(task, ast.FunctionDef):
        return "\n".join([*_head(task, lines), " " * (task.col_offset + 4) + "..."])
    methods = [inner for inner in task.body if isinstance(inner, ast.FunctionDef)]
    shown = [
        [*lines[_start(inner) - 1 : _above_code(inner)], " " * (inner.col_offset + 4) + "..."] for inner in methods
    ]
    return "\n\n".join("\n".join(part) for part in (_head(task, lines), *shown))


def without_docstring(task: Def, lines: list[str]) -> str:
    """The source of a task less its own docstring, which the page has as text."""
    return textwrap.dedent("\n".join([*_head(task, lines), *lines[_above_code(task) : task.end_lineno]]))


def _head(task: Def, lines: list[str]) -> list[str]:
    """The lines above the docstring, or above the code without one."""
    return lines[_start(task) - 1 : _start(task.body[0]) - 1]


def _above_code(task: Def) -> int:
    """The last line of the docstring, or of the head without one."""
    return (task.body[0].end_lineno or 0) if ast.get_docstring(task) else _start(task.body[0]) - 1


def _start(node: ast.stmt) -> int:
    """The first line, decorators included."""
    decorators = node.decorator_list if isinstance(node, Def) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
