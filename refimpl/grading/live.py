"""Grade one task at once, on ranks that stay warm: what `%%task` in a notebook and `refimpl exercise watch` share."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from refimpl.grading.chapters import Chapter, definitions, find_chapter, import_file
from refimpl.grading.grade import Exercise, Grader
from refimpl.grading.progress import Progress
from refimpl.grading.verdict import Verdict


class Live:
    """The graders of one chapter, and ranks that wait for an answer."""

    def __init__(self, chapter: Chapter, grader: Grader) -> None:
        self.chapter, self.grader = chapter, grader
        self.exercises = {exercise.task: exercise for exercise in exercises_of(chapter)}

    def warm(self) -> None:
        """Start the ranks that the chapter's graders will ask for."""
        for ranks in sorted({n for exercise in self.exercises.values() for n in exercise.ranks}):
            self.grader.warm(ranks)

    def grade(self, task: str, path: Path | None = None, told: Callable[[str], None] | None = None) -> Verdict:
        """The verdict on the learner's answer, which is kept as their progress. KeyError for another task."""
        verdict = self.grader.grade(self.exercises[task], path or self.chapter.exercise, told=told)
        Progress.load().record({(self.chapter.name, task): verdict})
        return verdict


def exercises_of(chapter: Chapter) -> list[Exercise]:
    """All that the chapter's graders ask, in no order."""
    modules = [import_file(path, path.stem) for path in chapter.graders]
    found = [getattr(value, "exercise", None) for module in modules for value in vars(module).values()]
    return [e for e in found if isinstance(e, Exercise)]


def changed_tasks(before: str, after: str, tasks: list[str]) -> list[str]:
    """Which tasks a change of the file concerns: those rewritten, or all if something else was.

    A comment or an empty line concerns none. SyntaxError if `after` is not Python; if `before` was not, all are new.
    """
    new = dict(parts(after))
    try:
        old = dict(parts(before))
    except SyntaxError:
        old = {}
    touched = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    return [task for task in tasks if task in touched or touched - set(tasks)]


def parts(source: str) -> Iterator[tuple[str, str]]:
    """A file's tasks and helpers by name, and all other statements under "", in a form that knows no comments."""
    tree = ast.parse(source)
    named = definitions(tree)
    yield from ((d.name, ast.dump(d)) for d in named)
    yield "", "\n".join(ast.dump(node) for node in tree.body if node not in named)


def write_into(source: str, cell: str, task: str) -> str:
    """The file `source` with what the notebook's cell defines: definitions of a name replace those of that name.

    What else the cell says (imports, helpers) goes before the task, unless it stands there already; what only tries the
    task is left out. SyntaxError if one of them is not Python, ValueError if the cell does not define the task.
    """
    mine, tree, tried = ast.parse(cell), ast.parse(source), {text for _, text in try_outs(cell, task)}
    last = {n.name: n for n in mine.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}  # of a name, as in Python
    if task not in last:
        raise ValueError(f"the cell defines {', '.join(sorted(last)) or 'nothing'}, not {task}")
    known = {ast.dump(node) for node in tree.body}
    lines = source.splitlines()
    fresh: list[str] = []
    places = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    replaced: list[tuple[ast.stmt, str]] = []
    for node in mine.body:
        text = segment(cell, node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and last[node.name] is not node:
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in places:
            replaced.append((places[node.name], text))
        elif ast.dump(node) not in known and text not in tried:
            fresh.append(text)
    at = first_line(places[task]) - 1 if task in places else len(lines)
    for old, text in sorted(replaced, key=lambda pair: -first_line(pair[0])):
        lines[first_line(old) - 1 : old.end_lineno] = text.splitlines()
        if fresh and first_line(old) - 1 == at:
            lines[at:at] = ["\n\n\n".join(fresh), "", ""]
    if task not in places:
        lines += ["", "", *fresh, "", ""]
    return "\n".join(lines).rstrip() + "\n"


def try_outs(cell: str, task: str) -> list[tuple[int, str]]:
    """What stands behind the task in its cell and only tries it, e.g. a print: (line, text). A file would run it with
    every import, before the task is there.
    """
    found, is_there = [], False
    for node in ast.parse(cell).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            is_there |= getattr(node, "name", "") == task
        elif is_there:
            uses = any(isinstance(n, ast.Name) and n.id == task for n in ast.walk(node))
            if uses or isinstance(node, ast.Expr | ast.Assert):
                found.append((node.lineno, segment(cell, node)))
    return found


def segment(source: str, node: ast.stmt) -> str:
    """The statement's own lines, decorators among them."""
    return "\n".join(source.splitlines()[first_line(node) - 1 : node.end_lineno])


def first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def grade_task(chapter: str, task: str) -> Verdict:
    """Grade what is written in the chapter's exercise.py, once, on ranks of its own: what the quiz does."""
    with Grader() as grader:
        return Live(find_chapter(chapter), grader).grade(task)
