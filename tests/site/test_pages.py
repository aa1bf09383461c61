"""How a notebook, a solution, a card and a link become Markdown."""

import ast
import base64
from pathlib import Path
from typing import Any

import pytest
from markdown import Markdown
from pages import notebook
from pages.exercises import stub, without_docstring
from pages.markdown import Dunders, fence, heading, mark_long_cells, relink, title
from pages.source import Sources, numbered

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG bytes"


def cell(*outputs: dict[str, Any], tags: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"cell_type": "code", "source": ["x = 1\n", "x"], "metadata": {"tags": list(tags)}, "outputs": list(outputs)}


def data(**kinds: Any) -> dict[str, Any]:
    return {"output_type": "display_data", "data": {name.replace("_", "/"): value for name, value in kinds.items()}}


def converted(*cells: dict[str, Any]) -> notebook.Page:
    return notebook.convert({"cells": list(cells)}, "05_zero2")


def test_code_and_plain_output() -> None:
    output = {"output_type": "stream", "text": "\x1b[31m[ranks 0-3]\x1b[0m\n6.0\n"}
    assert converted(cell(output)).markdown == (
        "```python\nx = 1\nx\n```\n\n``` { .text .nb-output }\n[ranks 0-3]\n6.0\n```\n"
    )


def test_a_picture_becomes_a_file_with_an_alternative_text() -> None:
    words = {"cell_type": "markdown", "source": "# T", "metadata": {}}
    page = converted(words, cell(data(image_png=base64.b64encode(PNG).decode())))
    assert page.pictures == {"05_zero2_1_0.png": PNG}
    assert "](05_zero2_1_0.png)" in page.markdown
    assert "![]" not in page.markdown


def test_a_table_keeps_its_rows_and_loses_its_style() -> None:
    page = converted(cell(data(text_html="<div><style scoped>td {}</style><table><tr><td>4</td></tr></table></div>")))
    assert "<td>4</td>" in page.markdown
    assert "style" not in page.markdown


@pytest.mark.parametrize(
    ("fallback", "expected"),
    [({"text_markdown": "**4** ranks"}, "**4** ranks"), ({"text_plain": "Box()"}, notebook.WIDGET)],
)
def test_a_widget_falls_back_to_text(fallback: dict[str, str], expected: str) -> None:
    output = data(**fallback)
    output["data"]["application/vnd.jupyter.widget-view+json"] = {"model_id": "7"}
    assert expected in converted(cell(output)).markdown


@pytest.mark.parametrize(
    ("tag", "code", "output"),
    [("remove-cell", False, False), ("remove-input", False, True), ("hide-input", True, True)],
)
def test_tags(tag: str, code: bool, output: bool) -> None:
    text = converted(cell({"output_type": "stream", "text": "six"}, tags=(tag,))).markdown
    assert ("x = 1" in text, "six" in text) == (code, output)
    assert ("??? " in text) == (tag == "hide-input")


def test_the_folded_code_of_a_prediction_says_that_the_answer_is_there() -> None:
    asked = cell(tags=("hide-input",)) | {"source": "predict('How many?', 3)"}
    assert '??? code "Code, with the answer"' in converted(asked).markdown
    assert '??? code "Code"' in converted(cell(tags=("hide-input",))).markdown


def test_a_fence_is_longer_than_what_it_holds() -> None:
    assert fence("a\n````\nb").splitlines()[0] == "`````"


def test_links_of_the_repository_become_links_of_the_site() -> None:
    text = "[a](../refimpl/launch.py#L3) [b](02_ddp.ipynb) [c](https://host/x) [d](#here) [e](gone.md)"
    known = {"refimpl/launch.py": "../source/refimpl/launch.py.md", "course/02_ddp.ipynb": "02_ddp.md"}
    assert relink(text, "course", known.get) == (
        "[a](../source/refimpl/launch.py.md#L3) [b](02_ddp.md) [c](https://host/x) [d](#here) [e](gone.md)"
    )


def test_code_links_go_to_the_built_commit_of_a_configured_repository() -> None:
    sources = Sources(ROOT, "https://host/group/project", "abc123")
    assert sources.link("refimpl/launch.py", "cards.md", 7) == (
        "https://host/group/project/blob/abc123/refimpl/launch.py#L7"
    )
    assert sources.pages() == {}


def test_code_links_go_to_pages_without_a_repository() -> None:
    sources = Sources(ROOT, "", "abc123")
    assert sources.link("refimpl/launch.py", "course/01.md", 7) == "../source/refimpl/launch.py.md#L7"
    assert list(sources.pages()) == ["source/refimpl/launch.py.md"]


def test_a_link_to_no_file_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"cards\.md links to refimpl/gone\.py"):
        Sources(ROOT, "", "").link("refimpl/gone.py", "cards.md")


def test_every_line_of_a_source_has_its_number() -> None:
    page = numbered('"""A `word`\n\n```\n"""\n\nx = 1\n')
    assert page.count('class="line"') == 6
    assert '<span id="L6" class="line"><span class="n">x</span>' in page
    assert "A `word`" in page, "as it stands: Markdown does not read it"


SOLUTION = '''
@torch.no_grad()
def f(x: int) -> int:
    """Add one."""
    # the answer
    return x + 1


class Scaler:
    """Scales."""

    def update(self, overflow: bool) -> None:
        """Halve or double."""
        self.scale = 3
'''


def test_a_task_shows_what_to_write_and_folds_the_answer() -> None:
    lines = SOLUTION.splitlines()
    function, scaler = (node for node in ast.parse(SOLUTION).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    assert stub(function, lines) == "@torch.no_grad()\ndef f(x: int) -> int:\n    ..."
    assert (
        without_docstring(function, lines)
        == "@torch.no_grad()\ndef f(x: int) -> int:\n    # the answer\n    return x + 1"
    )
    assert "Halve or double" in stub(scaler, lines)
    assert "self.scale" not in stub(scaler, lines)
    assert "self.scale" in without_docstring(scaler, lines)


def test_titles() -> None:
    assert [title(name) for name in ("02_ddp", "05_zero2", "03_precision_and_bytes", "13_three_d", "15_moe")] == [
        "02 DDP", "05 ZeRO-2", "03 Precision and bytes", "13 Three D", "15 MoE"]  # fmt: skip
    with pytest.raises(ValueError, match="no '# title'"):
        heading("text")


def test_a_dunder_is_a_name_and_no_emphasis() -> None:
    html = Markdown(extensions=[Dunders()]).convert("runtime/pipe/__init__.py, `__dict__`, __all of it__")
    assert html == "<p>runtime/pipe/__init__.py, <code>__dict__</code>, <strong>all of it</strong></p>"


def test_cells_with_much_to_say_are_marked() -> None:
    rows = '<thead><tr><th>bytes</th></tr></thead><tr><td style="x">summed over <b>all</b> ranks</td><td>4</td></tr>'
    assert mark_long_cells(rows) == rows.replace('"x"', '"x" data-long')
