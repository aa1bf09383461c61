"""The picture in the README is the house: every room stands on a floor, imports go strictly down, and in no circle."""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
Graph = dict[str, set[str]]  # module -> modules that it imports


def floors(text: str) -> dict[str, int]:
    """Room (a folder, or a module beside the folders) -> its floor, as the picture has it."""
    (picture,) = re.findall(r"```\n(floor \d.*?)```", text, re.DOTALL)
    found, floor = {}, -1
    for line in picture.splitlines():
        if number := re.match(r"floor (\d+)", line):
            floor = int(number[1])
        if room := re.match(r"(?:floor \d+)?\s+(\w+)(?:/|\.py)\s", line):
            found[room[1]] = floor
    return found


def modules(package: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    result = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return result


def graph(package: Path, annotations: bool) -> Graph:
    """Which module imports which, in functions too. `annotations`: also what is imported for type checkers alone."""
    known = modules(package)
    return {name: set(imported(file, known, annotations)) - {name} for name, file in known.items()}


def imported(file: Path, known: Mapping[str, Path], annotations: bool) -> Iterator[str]:
    """The modules of this package that one file imports. `from a import b` is a.b where there is such a module."""
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not annotations:
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in inner)
        waiting += ast.iter_child_nodes(node)


def upward(graph: Graph, floor: Mapping[str, int]) -> list[str]:
    """Every import that does not go down. The package's own `__init__` and `__main__` are its doors, not rooms."""
    rooms = {name: name.split(".")[1] for name in graph if "." in name and not name.endswith(".__main__")}
    return [
        f"{name} (floor {floor[room]}) imports {other} (floor {floor[rooms[other]]})"
        for name, room in rooms.items()
        for other in sorted(graph[name] & rooms.keys())
        if room != rooms[other] and floor[room] <= floor[rooms[other]]
    ]


def circle(graph: Graph) -> list[str]:
    """Modules that import each other in a circle; empty if none do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_picture_names_every_room() -> None:
    rooms = {p.stem for p in (ROOT / "refimpl").iterdir() if (p / "__init__.py").exists() or p.suffix == ".py"}
    assert set(floors(README)) == rooms - {"__init__", "__main__"}


def test_imports_go_down_the_floors() -> None:
    assert upward(graph(ROOT / "refimpl", annotations=True), floors(README)) == []


def test_no_import_circle() -> None:
    """Nor among annotations, except in zero/: a stage and the parameters it takes over speak of each other."""
    assert circle(graph(ROOT / "refimpl", annotations=False)) == []
    all_imports = graph(ROOT / "refimpl", annotations=True)
    doors = {"refimpl"}  # names its public classes for type checkers; at run time it imports them when asked
    outside = {name: others - doors for name, others in all_imports.items() if not name.startswith("refimpl.zero.")}
    assert circle(outside) == []


def test_inside_the_package_nothing_comes_through_its_front_door() -> None:
    """`from refimpl import Zero3` would hide a floor; the version is all that is taken there."""
    taken = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / "refimpl").rglob("*.py")
        for names in re.findall(r"(?m)^\s*from refimpl import (.+)$", file.read_text(encoding="utf-8"))
        for name in names.split(", ")
        if name != "__version__" and f"refimpl.{name}" not in modules(ROOT / "refimpl")
    }
    assert taken == set()


@pytest.mark.parametrize(
    ("low", "high", "wrong", "round_"),
    [
        ("", "from p.low import a", 0, False),
        ("from p.high import a", "", 1, False),
        ("def f():\n    from p.high import a", "from p.low import a", 1, True),
        ("import p.same.a", "", 1, False),
        ("if TYPE_CHECKING:\n    from p.high import a", "", 1, False),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, low: str, high: str, wrong: int, round_: bool) -> None:
    package = tmp_path / "p"
    for room, text in {"low": low, "same": "", "high": high}.items():
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").touch()
        (package / room / "a.py").write_text(text)
    (package / "__init__.py").touch()
    picture = floors("```\nfloor 1   high/  x\nfloor 0   low/  y\n          same/  z\n```")
    assert len(upward(graph(package, annotations=True), picture)) == wrong
    assert bool(circle(graph(package, annotations=False))) == round_
