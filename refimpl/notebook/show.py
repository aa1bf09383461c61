"""What a chapter shows: real source code, the difference between two pieces of it, theory beside count, and figures.

from refimpl.notebook import show
show.source(ring.all_reduce)
show.diff(zero1.Zero1, zero2.Zero2)
show.compare(formula={"all_reduce": 96}, counted=group.ledger.sent_bytes())
figure, axis = show.figure(3)
"""

import ast
import difflib
import functools
import inspect
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import refimpl

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_ROOT = Path(refimpl.__file__).parents[1]
WIDTH = 96  # columns that a page shows; JupyterLab breaks a longer line where it ends, in the middle of a word
INCHES = 4.8  # of every figure: on the 358 px of a phone's page type of 9 points is still 9 px high


class Code:
    """A block of code: a notebook colours it, a terminal prints it."""

    def __init__(self, title: str, text: str, language: str = "python") -> None:
        self.title, self.text, self.language = title, text.strip("\n"), language

    def __repr__(self) -> str:
        return f"{self.title}\n\n{self.text}"

    def _repr_markdown_(self) -> str:
        fence = "````" if "```" in self.text else "```"
        text = "\n".join(line for whole in self.text.splitlines() for line in self._fold(whole))
        return f"`{self.title}`\n\n{fence}{self.language}\n{text}\n{fence}"

    def _fold(self, line: str) -> list[str]:
        """The line, broken between words if it is longer than a page is wide. What continues a comment is one too."""
        if len(line) <= WIDTH:
            return [line]
        wrap = functools.partial(textwrap.wrap, line, WIDTH, break_long_words=False, break_on_hyphens=False)
        sign = line[0] if self.language == "diff" else ""
        indent = len(line[len(sign) :]) - len(line[len(sign) :].lstrip())
        comment = "# " if "# " in wrap()[0] else ""
        deeper = 0 if line[len(sign) :].lstrip().startswith("#") else 4
        return wrap(subsequent_indent=sign + " " * (indent + deeper) + comment)


def source(*objects: Any, docstrings: bool = True) -> Code:
    """The code of functions, classes or modules, as it runs, under the name of their file."""
    files = list(dict.fromkeys(file_of(obj) for obj in objects))
    return Code(", ".join(files), "\n\n\n".join(code(obj, docstrings).strip("\n") for obj in objects))


def diff(old: Any, new: Any, context: int = 2) -> Code:
    """The lines that differ between two pieces of code, prose aside; ⋮ stands for what they share."""
    before, after = (code(obj, docstrings=False).splitlines() for obj in (old, new))
    lines = list(difflib.unified_diff(before, after, n=context, lineterm=""))[2:]
    shown = [" ⋮" if line.startswith("@@") else line for line in lines[1:]]
    return Code(f"{file_of(old)} -> {file_of(new)}", "\n".join(shown), "diff")


def compare(formula: dict[str, int], counted: dict[str, int]) -> "pd.DataFrame":
    """Theory beside measurement: one row a key, with a column that says whether they are equal."""
    import pandas as pd

    keys = list(dict.fromkeys([*formula, *counted]))
    rows = [[formula.get(key, 0), counted.get(key, 0)] for key in keys]
    frame = pd.DataFrame(rows, index=keys, columns=["formula", "counted"])
    frame["equal"] = frame["formula"] == frame["counted"]
    return frame


def figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple["Figure", Any]:
    """A matplotlib figure and its axes, as wide as a phone shows. `height` in inches; `options` as of `plt.subplots`.

    Panels go below one another (`rows`), unless they are small. Leave sizes of type as they are, or at 9 and more.
    """
    import matplotlib.pyplot as plt

    made, axes = plt.subplots(rows, columns, figsize=(INCHES, height), dpi=120, layout="constrained", **options)
    for axis in made.axes:
        axis.spines[["top", "right"]].set_visible(False)
    return made, axes


def file_of(obj: Any) -> str:
    """The file of a function, class or module, from the project's root: "refimpl/comm/ring.py"."""
    plain = inspect.unwrap(obj) if callable(obj) else obj  # a decorator has a file of its own
    file = Path(inspect.getsourcefile(plain) or inspect.getfile(plain))
    return file.relative_to(_ROOT).as_posix() if file.is_relative_to(_ROOT) else file.name


def code(obj: Any, docstrings: bool = True) -> str:
    """The source of a function, class or module; without its docstrings if so wished."""
    text = textwrap.dedent(inspect.getsource(obj))
    return text if docstrings else _without_docstrings(text)


def _without_docstrings(text: str) -> str:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            if len(node.body) > 1:  # else it is all there is
                begin, end = docstring.lineno - 1, docstring.end_lineno or docstring.lineno
                lines[begin:end] = [""] * (end - begin)
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1] and not kept[-1].endswith(":")):  # a blank line neither twice nor after a `def`
            kept.append(line)
    return "\n".join(kept)
