"""Ways to the right numbers that are not the exercise: named, so that nobody mistakes them for a pass.

Read from the file's text, for one task: its own definition, and what of the file it uses. calls.py sees what the text
does not tell.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from refimpl.grading.chapters import parsed

# Of refimpl, what an answer is handed or may look at itself with, and where its prints go (ranks.rank); all else is,
# or holds, somebody's answer.
OPEN = (
    "refimpl.comm.group", "refimpl.comm.work", "refimpl.measure", "refimpl.launch", "refimpl.ranks.rank",
    "refimpl.grading.drive", "refimpl.grading.late",
)  # fmt: skip
MOVES = {
    "all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor", "broadcast",
    "all_gather_object", "broadcast_object_list", "send", "recv", "isend", "irecv", "batch_isend_irecv", "all_to_all",
    "all_to_all_single", "gather", "scatter", "reduce", "gather_object", "scatter_object_list",
}  # fmt: skip
GRADERS = {"everyone", "oracle", "fresh", "control", "handle", "transport"}  # of the group, not the answer's to use


def cheat(path: Path, task: str) -> str:
    """What `task` in this file does instead of the exercise, in a sentence; "" if nothing is seen."""
    try:
        tree = parsed(path.read_text())
    except (SyntaxError, ValueError, OSError):
        return ""
    names = _imports(tree)
    for node in [n for part in _used(tree, task) for n in ast.walk(part)]:
        if said := _said(node, names):
            return f"{path.name} line {getattr(node, 'lineno', 0)}: {said}"
    return ""


def _said(node: ast.AST, names: dict[str, str]) -> str:
    """The cheat that this node is."""
    if isinstance(node, ast.Constant) and "solutions" in re.split(r"[/\\.]", str(node.value)):
        return "the solutions are read; write the answer here"
    dotted = _dotted(node, names)
    for full in dotted:
        if full.split(".")[0] == "solutions":
            return "the solution is imported; write the answer here"
        if said := closed(full):
            return said
        if full.startswith("torch.distributed.") and full.rpartition(".")[2] in MOVES:
            return around(full)
    if isinstance(node, ast.Attribute) and node.attr in GRADERS and _name(node.value) == "group":
        return for_graders(node.attr)
    return ""


def closed(full: str) -> str:
    """What is wrong with using this name, or ""."""
    if full.startswith("torch.utils.checkpoint"):
        return f"{full} is the exercise, done; write it with torch.autograd"
    if not full.startswith("refimpl.") or any(full.startswith(o) or o.startswith(full) for o in OPEN):
        return ""
    return f"{full} is refimpl's own; the exercise is to write it from what `group` offers"


def around(full: str) -> str:
    return f"{full} goes round the group, uncounted: every byte must go through `group`"


def for_graders(name: str) -> str:
    return f"group.{name} is for the grader; use the group's collectives, which are counted"


def _used(tree: ast.Module, task: str) -> list[ast.stmt]:
    """The task's definition, and all of the file's other definitions and values that it refers to."""
    named: dict[str, ast.stmt] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            named[statement.name] = statement
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            named[statement.targets[0].id] = statement
    wanted, found = [task], dict[str, ast.stmt]()
    while wanted:
        name = wanted.pop()
        if name in named and name not in found:
            found[name] = named[name]
            wanted += [n.id for n in ast.walk(named[name]) if isinstance(n, ast.Name)]
    return list(found.values())


def _imports(tree: ast.Module) -> dict[str, str]:
    """Every name that an import of the file binds -> what it stands for, dotted."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                      for a in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _dotted(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """The full names of what this node refers to, if it begins with an imported name."""
    if isinstance(node, ast.Name) and node.id in names:
        yield names[node.id]
    elif isinstance(node, ast.Attribute):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in names:
            yield ".".join([names[inner.id], *reversed(parts)])


def _name(node: ast.AST) -> str:
    """The last name of `group` or `self.group`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
