"""A mutant: a wrong answer to one task, written as what it does otherwise than the solution.

Behind the solution's text it is an answer: what it does not define is right, and `class Zero3(Zero3)` is the solution's
class but for some methods. Its docstring says what is wrong, names the `task:`, and what the grader's report `says:`.
"""

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from refimpl.grading.chapters import Chapter


@dataclass(frozen=True)
class Mutant:
    chapter: Chapter
    path: Path

    @property
    def id(self) -> str:
        return f"{self.chapter.name}/{self.path.stem}"

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def fault(self) -> str:
        """What is wrong, in a sentence or two."""
        return " ".join(self.docstring.partition("\n\n")[0].split())

    @property
    def task(self) -> str:
        (task,) = re.findall(r"^task: (.+)$", self.docstring, re.MULTILINE)
        return str(task)

    @property
    def says(self) -> list[str]:
        return re.findall(r"^says: (.+)$", self.docstring, re.MULTILINE)

    @property
    def code(self) -> str:
        """What it does otherwise, with no comment that tells."""
        nodes = [n for n in self.tree.body[1:] if not isinstance(n, ast.Import | ast.ImportFrom)]
        return "\n\n\n".join(map(ast.unparse, nodes))

    @property
    def answer(self) -> str:
        """The whole file that would be handed in."""
        return f"{self.chapter.solution.read_text()}\n\n{self.path.read_text()}"


def mutants_of(chapter: Chapter) -> list[Mutant]:
    """Those of a chapter, by name."""
    return [Mutant(chapter, path) for path in chapter.mutants]
