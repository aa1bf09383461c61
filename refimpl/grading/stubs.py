"""Stubs from solutions: `python -m refimpl.grading.stubs` writes exercises/NN_name/exercise.py for each solution.

A stub is the solution's text without HINTS and private helpers, each body to write replaced by
`raise NotImplementedError`; docstrings, imports, and the functions marked `# given` stay. A file in which something has
been written is the learner's: it is kept, unless --force is given.
"""

import ast
import sys

from refimpl.grading.chapters import Chapter, Def, bodies, chapters, definitions, is_given, unwritten


def stub(source: str) -> str:
    """The stub of a solution."""
    tree = ast.parse(source)
    lines = source.splitlines()
    cuts: list[tuple[int, int, list[str]]] = []  # [first, last) lines, and what replaces them
    for node in tree.body:
        is_hints = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "HINTS"
        is_helper = isinstance(node, Def) and node.name.startswith("_") and not is_given(node, lines)
        if is_hints or is_helper:
            cuts.append((node.lineno - 1, node.end_lineno or 0, []))
    for definition in definitions(tree):
        for function in bodies(definition, source):
            name = function.name if definition is function else f"{definition.name}.{function.name}"
            documented = ast.get_docstring(function) is not None
            first = (function.body[0].end_lineno or 0) if documented else function.body[0].lineno - 1
            raised = " " * (function.col_offset + 4) + f'raise NotImplementedError("{name}")'
            cuts.append((first, function.end_lineno or 0, [raised]))
    for first, last, replacement in sorted(cuts, reverse=True):
        lines[first:last] = replacement
        while not replacement and first < len(lines) and not lines[first].strip():
            del lines[first]  # the blank lines behind what was cut
    return "\n".join(lines).rstrip() + "\n"


def touched(chapter: Chapter) -> bool:
    """Whether the learner has begun: some task is no longer a stub, or the file does not parse."""
    path = chapter.exercise
    if not path.exists():
        return False
    try:
        tree, source = ast.parse(path.read_text()), path.read_text()
    except SyntaxError:
        return True
    wanted = {d.name: len(bodies(d, source)) for d in definitions(tree)}
    return any(len(unwritten(path, task)) < wanted.get(task, 0) for task in chapter.tasks)


def write(chapter: Chapter, force: bool = False) -> str:
    """Write one chapter's stub; returns what was done, in a line."""
    text, path = stub(chapter.solution.read_text()), chapter.exercise
    if path.exists() and path.read_text() == text:
        return f"{path}: up to date"
    if touched(chapter) and not force:
        return f"{path}: kept, because something is written there (--force, or: refimpl exercise reset {chapter.name})"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"{path}: written"


if __name__ == "__main__":
    for each in chapters():
        print(write(each, force="--force" in sys.argv[1:]))
