"""Where a name stands: "refimpl.zero.zero2:Zero2.reduce" or "tests/zero/test_stages.py::test_x" -> file and lines.

Read from the source's syntax tree, so that nothing is imported for it.
"""

import ast
import copy
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import refimpl
from refimpl.bank.scope import BankError

ROOT = Path(refimpl.__file__).parents[1]  # the clone


class Place(NamedTuple):
    file: str  # relative to the clone
    line: int
    end: int


def of_code(symbol: str) -> Place:
    """`module:Name.attribute`: a function, class, method or assigned name. BankError if there is none."""
    module, name = symbol.split(":")
    path = Path(*module.split("."))
    file = path / "__init__.py" if (ROOT / path).is_dir() else path.with_suffix(".py")
    return _find(file.as_posix(), name, symbol)


def of_test(node: str) -> Place:
    """`tests/.../test_x.py::test_name`. BankError if there is none."""
    file, name = node.split("::")
    return _find(file, name, node)


def of_task(chapter: str, task: str) -> Place:
    """A task of the exercises, where its solution stands. BankError if there is none."""
    return _find(f"solutions/{chapter}.py", task, f"{chapter} {task}")


def stub(chapter: str, task: str) -> str:
    """A task as it is given: its signatures and docstrings, without what is to be written."""
    place = of_task(chapter, task)
    node = next(n for n in _parse(ROOT / place.file).body if task in _names(n))
    return ast.unparse(_Emptied().visit(copy.deepcopy(node)))


class _Emptied(ast.NodeTransformer):
    """Functions without bodies."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        documented = ast.get_docstring(node) is not None
        node.body = [*node.body[:documented], ast.Expr(ast.Constant(...))]
        return node


def _find(file: str, name: str, symbol: str) -> Place:
    path = ROOT / file
    if not path.is_file():
        raise BankError(f"{symbol}: there is no file {file}")
    body: Iterable[ast.stmt] = _parse(path).body
    place = None
    for part in name.split("."):
        node = next((n for n in body if part in _names(n)), None)
        if node is None:
            raise BankError(f"{symbol}: {file} has no {name}")
        decorators = getattr(node, "decorator_list", [])
        place = Place(file, min([node.lineno, *(d.lineno for d in decorators)]), node.end_lineno or node.lineno)
        body = getattr(node, "body", [])
    assert place is not None
    return place


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
