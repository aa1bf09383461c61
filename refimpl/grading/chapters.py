"""Where the chapters' files are, which tasks they hold, and which of those are still to do."""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

GIVEN = "# given"
Def = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Chapter:
    """One chapter's files below the project's folder `root`."""

    name: str  # "01_collectives"
    root: Path

    @property
    def solution(self) -> Path:
        return self.root / "solutions" / f"{self.name}.py"

    @property
    def exercise(self) -> Path:
        return self.root / "exercises" / self.name / "exercise.py"

    @property
    def grader(self) -> Path:
        return self.root / "exercises" / self.name / f"test_{self.name}.py"

    @property
    def graders(self) -> list[Path]:
        """The files of the chapter's graders: one, or several with some tasks each."""
        return sorted(self.grader.parent.glob("test_*.py"))

    @property
    def mutants(self) -> list[Path]:
        return sorted((self.root / "tests" / "mutants" / self.name).glob("*.py"))

    @cached_property
    def tasks(self) -> list[str]:
        """Names of what is to be written, in the order of the solution."""
        source = self.solution.read_text()
        return [d.name for d in definitions(parsed(source)) if bodies(d, source)]

    @cached_property
    def hints(self) -> dict[str, list[str]]:
        """The solution's HINTS: task -> hints, the vaguest first."""
        for node in parsed(self.solution.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "HINTS":
                hints: dict[str, list[str]] = ast.literal_eval(node.value)
                return hints
        return {}


def project_folder() -> Path:
    """The folder that holds exercises/ and solutions/: here, above, or that of the installed source.

    FileNotFoundError if there is none.
    """
    here = Path.cwd().resolve()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[2]):
        if (folder / "exercises").is_dir() and (folder / "solutions").is_dir():
            return folder
    raise FileNotFoundError(f"no folder with exercises/ and solutions/ at or above {here}: go to the project's folder")


def chapters(root: Path | None = None) -> list[Chapter]:
    """All chapters that have a solution, in order."""
    root = root or project_folder()
    return [Chapter(path.stem, root) for path in sorted((root / "solutions").glob("[0-9][0-9]_*.py"))]


def find_chapter(name: str, root: Path | None = None) -> Chapter:
    """The chapter called `name`, "01_collectives", "01" or "1"; ValueError names those there are."""
    known = chapters(root)
    for chapter in known:
        number = chapter.name.partition("_")[0]
        if name in (chapter.name, number, number.lstrip("0")):
            return chapter
    raise ValueError(f"no chapter {name!r}: there are {', '.join(c.name for c in known)}")


@lru_cache(maxsize=8)
def parsed(source: str) -> ast.Module:
    """Only to be read: one grading looks at an answer's tree four times. SyntaxError and ValueError as `ast.parse`."""
    return ast.parse(source)


def definitions(tree: ast.Module) -> list[Def]:
    """The public functions and classes of a module."""
    return [n for n in tree.body if isinstance(n, Def) and not n.name.startswith("_")]


def bodies(definition: Def, source: str) -> list[ast.FunctionDef]:
    """The functions of a definition whose bodies are the learner's: itself, or a class's methods, less the given."""
    inside = definition.body if isinstance(definition, ast.ClassDef) else [definition]
    functions = [n for n in inside if isinstance(n, ast.FunctionDef)]
    lines = source.splitlines()
    return [f for f in functions if not is_given(f, lines)]


def is_given(definition: Def, lines: list[str]) -> bool:
    """Whether the line before its body says so: it stays in the stub as it is."""
    return lines[definition.body[0].lineno - 2].rstrip().endswith(GIVEN)


def is_stub(function: ast.FunctionDef) -> bool:
    """Whether the body, after its docstring, is a single `raise NotImplementedError`."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.dump(body[0])


def unwritten(path: Path, task: str) -> list[str]:
    """What of a task is still a stub in the file: ["NAME"], or ["NAME.method", ...]; [] also if it does not parse."""
    try:
        source = path.read_text()
        tree = parsed(source)
    except (SyntaxError, ValueError, OSError):
        return []
    for definition in reversed(definitions(tree)):  # of two with one name Python has the last
        if definition.name == task:
            left = [f.name for f in bodies(definition, source) if is_stub(f)]
            return left if isinstance(definition, ast.FunctionDef) else [f"{task}.{name}" for name in left]
    return []


def import_file(path: Path, name: str) -> Any:
    """Run the file as a fresh module called `name`, which is not entered in sys.modules.

    Its text as it is now: the bytecode that Python keeps is another answer's, if that had the same size and time.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    module = importlib.util.module_from_spec(spec)
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    return module
