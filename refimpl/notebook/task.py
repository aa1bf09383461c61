"""The cell magic `%%task CHAPTER NAME`: an exercise, written in the notebook and graded on run.

    %%task 01_collectives ring_reduce_scatter
    def ring_reduce_scatter(group, x):
        ...

What the cell defines goes into the exercise's own file, exercises/CHAPTER/exercise.py, in place of what stood there,
and the exercise's grader judges it on ranks that stay warm: about a second. The rest of the file stays. An answer that
was there already, and that no cell of this notebook wrote, is kept beside it. `%hint CHAPTER NAME` gives one hint more
each time. A cell that still raises NotImplementedError saves and grades nothing.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from refimpl.grading.chapters import Chapter, find_chapter, is_stub, unwritten
from refimpl.grading.grade import Grader
from refimpl.grading.hints import one_more
from refimpl.grading.live import Live, try_outs, write_into
from refimpl.grading.stubs import stub
from refimpl.grading.verdict import Verdict
from refimpl.userdata import free_name, replace


@dataclass
class Tasks:
    """The exercises of a notebook: their graders with warm ranks, and the files as its cells left them."""

    grader: Grader = field(default_factory=Grader)
    live: dict[str, Live] = field(default_factory=dict)
    written: dict[Path, str] = field(default_factory=dict)

    def run(self, chapter: Chapter, task: str, cell: str) -> str:
        """Save and grade; what the learner reads. SyntaxError, ValueError for a cell that does not define the task."""
        if asks(cell, task):
            return f"todo  {task}: write its body, and run this cell. %hint {chapter.name} {task} helps."
        note = self.save(chapter, task, cell)
        if chapter.name not in self.live:
            self.live[chapter.name] = Live(chapter, self.grader)
        verdict = self.live[chapter.name].grade(task)
        return "\n".join(filter(None, [note, said(verdict, chapter)]))

    def save(self, chapter: Chapter, task: str, cell: str) -> str:
        """Put the cell into the learner's file. Says what is left out, and where an answer from before is kept."""
        path, notes = chapter.exercise, [left_out(*tried) for tried in try_outs(cell, task)]
        before = path.read_text() if path.exists() else stub(chapter.solution.read_text())
        after = write_into(before, cell, task)
        if path.exists() and after != before and self.written.get(path) != before and not unwritten(path, task):
            kept = free_name(path, "kept")
            kept.write_text(before)
            notes.append(f"{kept.name} keeps the answer that was there before")
        replace(path, after)
        self.written[path] = after
        return "\n".join(notes)


def left_out(line: int, text: str) -> str:
    """`line` counts from the cell's first below the magic."""
    first, why = text.splitlines()[0], "as it only tries the answer (do so in a cell of its own)"
    return f"line {line + 1} is not saved, {why}: {first}"


def asks(cell: str, task: str) -> bool:
    """Whether the cell has the task as the chapter gives it: nothing written yet."""
    for node in reversed(ast.parse(cell).body):  # of two with one name Python has the last
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == task:
            functions = [f for f in ast.walk(node) if isinstance(f, ast.FunctionDef)]
            return any(is_stub(f) for f in functions)
    return False


def said(verdict: Verdict, chapter: Chapter) -> str:
    if verdict.outcome == "pass":
        return f"pass  {verdict.task}"
    return f"{verdict.outcome}  {verdict.text}\n\n%hint {chapter.name} {verdict.task} helps."


def load(shell: InteractiveShell) -> None:
    """Add `%%task` and `%hint` to a notebook."""
    tasks = Tasks()

    def task(line: str, cell: str) -> None:
        chapter, name = arguments("%%task", line)
        try:
            print(tasks.run(chapter, name, cell))
        except SyntaxError as error:
            raise UsageError(f"line {(error.lineno or 0) + 1} is not Python: {error.msg}") from None
        except ValueError as error:
            raise UsageError(str(error)) from None

    def hint(line: str) -> None:
        chapter, name = arguments("%hint", line)
        hints, left = one_more(chapter, name)
        print("\n".join(f"{number}. {text}" for number, text in enumerate(hints, 1)))
        print(f"{left} more: run it again." if left else f"The last one. `refimpl hint {line} --give-up` solves it.")

    task.__doc__ = hint.__doc__ = __doc__
    shell.register_magic_function(task, "cell")  # type: ignore[arg-type]
    shell.register_magic_function(hint, "line")  # type: ignore[arg-type]


def arguments(magic: str, line: str) -> tuple[Chapter, str]:
    """The chapter and the task named behind a magic. UsageError, which a notebook shows in one line."""
    words = line.split()
    if len(words) != 2:
        raise UsageError(f"{magic} needs a chapter and a task: {magic} 01_collectives ring_reduce_scatter")
    try:
        chapter = find_chapter(words[0])
    except (ValueError, FileNotFoundError) as reason:
        raise UsageError(str(reason)) from None
    if words[1] not in chapter.tasks:
        raise UsageError(f"{chapter.name} has no task {words[1]!r}: there are {', '.join(chapter.tasks)}")
    return chapter, words[1]
