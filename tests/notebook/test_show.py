"""What `show` prints is the code that runs."""

import ast
import inspect

import pytest

from refimpl.comm import collectives, ring
from refimpl.notebook import show
from refimpl.ranks import errors


def test_source_is_the_real_code_with_its_file():
    shown = show.source(ring.all_reduce, ring.all_gather)
    assert shown.title == "refimpl/comm/ring.py"
    assert shown.text == inspect.getsource(ring.all_reduce) + "\n\n" + inspect.getsource(ring.all_gather).strip("\n")
    assert shown._repr_markdown_().startswith("`refimpl/comm/ring.py`\n\n```python\ndef all_reduce(")
    assert (
        show.source(ring.all_reduce, collectives.all_gather).title
        == "refimpl/comm/ring.py, refimpl/comm/collectives.py"
    )


def test_a_line_longer_than_the_page_is_broken_between_words():
    for shown in (show.source(collectives), show.diff(ring, collectives)):
        assert max(map(len, shown.text.splitlines())) > show.WIDTH  # else this test says nothing
        _, *lines = shown._repr_markdown_().splitlines()
        inside = lines[2:-1]
        assert max(map(len, inside)) <= show.WIDTH
        if shown.language == "python":
            words = [[word for word in text.split() if word != "#"] for text in (" ".join(inside), shown.text)]
            assert words[0] == words[1]
        else:  # the rest of a broken line keeps its sign
            assert {line[:1] for line in inside} <= {"+", "-", " ", ""}


def without_docstrings(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or node.body
    return ast.dump(tree)


def test_code_without_docstrings_is_the_same_code():
    for obj in (ring, collectives, errors, show.Code, ring.all_reduce):
        bare, whole = show.code(obj, docstrings=False), show.code(obj)
        assert inspect.getdoc(obj) not in bare
        assert without_docstrings(bare) == without_docstrings(whole)
    assert "class RankTimeout" in show.code(errors, docstrings=False)
    assert "# Python's -1 is the ring's wrap-around" in show.code(ring._reduce, docstrings=False)
    assert show.code(ring.all_reduce, docstrings=False).splitlines()[1].strip().startswith("checks.")


def test_diff_has_the_changed_lines_and_no_noise():
    shown = show.diff(ring.reduce_scatter, ring.all_gather)
    lines = shown.text.splitlines()
    assert shown.title == "refimpl/comm/ring.py -> refimpl/comm/ring.py"
    assert lines[0].startswith("-def reduce_scatter(")
    assert not any(line.startswith(("---", "+++", "@@")) or "ValueError" in line for line in lines)
    assert show.diff(ring, ring).text == ""


def test_compare_says_what_differs():
    frame = show.compare({"a": 1, "b": 2}, {"b": 2, "c": 3})
    assert frame.loc[["a", "b", "c"]].to_numpy().tolist() == [[1, 0, False], [2, 2, True], [0, 3, False]]


def test_what_has_no_source_is_refused():
    with pytest.raises(TypeError):
        show.source(len)
