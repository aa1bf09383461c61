"""A notebook cell, as one rank runs it: in a namespace that stays, and with what it shows as its result."""

import ast
import base64
import io
import linecache
import os
import sys
import traceback
import types
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from refimpl.comm.group import Group
from refimpl.launch import report
from refimpl.ranks.lost import lost_connection

Bundle = dict[str, str]  # MIME type -> what a notebook can display


@dataclass(frozen=True)
class Stop:
    """Why a cell stopped on one rank: sent to the notebook at once, while the other ranks may still run."""

    title: str  # "ValueError: shard 3 is empty"
    lines: tuple[str, ...]  # "In[7]:3: x = shard(3)", outermost first; only those of cells
    secondary: bool  # it only lost its connection: another rank failed first

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  at {line}" for line in self.lines)])


def file_of(execution_count: int) -> str:
    """The name under which a cell is compiled, which is how the notebook labels it."""
    return f"In[{execution_count}]"


def remember(file: str, source: str) -> None:
    """So that errors, hang reports and `inspect.getsource` can quote the cell."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)


def prepare() -> None:
    """In a new rank: an empty `__main__` with the names that every cell may use."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(rank=dist.get_rank(), world_size=dist.get_world_size(), group=Group.world())
    vars(main).update(torch=torch, dist=dist)
    os.environ["MPLBACKEND"] = "Agg"  # figures are collected after the cell, so `plt.show()` has nothing to do
    warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")


def execute(source: str, file: str, only: Collection[int]) -> list[Bundle]:
    """Run a cell if this rank is one of `only`. Its last expression, if any, and its figures."""
    if dist.get_rank() not in only:
        return []
    remember(file, source)
    try:
        value = _run(ast.parse(source, file), file)
        shown = [] if value is None or source.rstrip().endswith(";") else [bundle(value)]
        return shown + _figures()
    except BaseException as error:
        report(_stop(error))
        raise


def evaluate(expression: str) -> Any:
    try:
        return eval(expression, vars(sys.modules["__main__"]))
    except BaseException as error:
        report(_stop(error))
        raise


def assign(values: dict[str, Any]) -> None:
    vars(sys.modules["__main__"]).update(values)


def bundle(value: object) -> Bundle:
    """A value as text, and as HTML if it knows how (a DataFrame does)."""
    html = getattr(value, "_repr_html_", lambda: None)()
    return {"text/plain": repr(value)} | ({"text/html": html} if html else {})


def _run(tree: ast.Module, file: str) -> Any:
    """The value of the cell's last statement if that is an expression, else None."""
    names = vars(sys.modules["__main__"])
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), names)
    return eval(compile(ast.Expression(last.value), file, "eval"), names) if isinstance(last, ast.Expr) else None


def _figures() -> list[Bundle]:
    """matplotlib's open figures, closed."""
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is None:
        return []
    figures = [plt.figure(number) for number in plt.get_fignums()]
    plt.close("all")
    return [{"image/png": _png(figure), "text/plain": "<Figure>"} for figure in figures]


def _png(figure: Any) -> str:
    figure.savefig(file := io.BytesIO(), format="png", bbox_inches="tight")
    return base64.b64encode(file.getvalue()).decode()


def _stop(error: BaseException) -> Stop:
    title = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    lines = tuple(f"{f.filename}:{f.lineno}: {f.line}" for f in frames if f.filename.startswith("In["))
    return Stop(title, lines, lost_connection(error))
