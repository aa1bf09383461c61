"""A notebook as a Markdown page: about 20 KB, where the usual converters make 700 KB and load from other hosts."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pages.markdown import fence, folded

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
STYLE = re.compile(r"<style.*?</style>", re.DOTALL)
OUTPUT = " { .text .nb-output }"
WIDGET = "*An interactive widget stands here: open the notebook to use it.*"


@dataclass
class Page:
    """Markdown, and the pictures that it shows by file name."""

    markdown: str = ""
    pictures: dict[str, bytes] = field(default_factory=dict)


def convert(notebook: Mapping[str, Any], name: str) -> Page:
    """The cells of a notebook (nbformat 4) in order. Tags: `remove-cell`, `remove-input`, `hide-input`.

    `name` begins the file names of the pictures. A picture's alternative text is the cell's metadata `alt`.
    """
    page = Page()
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        tags = cell["metadata"].get("tags", ())
        if "remove-cell" in tags:
            continue
        if cell["cell_type"] == "markdown":
            parts.append(text_of(cell["source"]))
        elif cell["cell_type"] == "code":
            code = fence(text_of(cell["source"]), "python")
            if "hide-input" in tags:
                parts.append(folded("code", "Code, with the answer" if "predict(" in code else "Code", code))
            elif "remove-input" not in tags:
                parts.append(code)
            alt = cell["metadata"].get("alt", f"Plot made by the code above (cell {number})")
            for place, output in enumerate(cell["outputs"]):
                parts.append(show(output, page, f"{name}_{number}_{place}.png", alt))
    page.markdown = "\n\n".join(part for part in parts if part) + "\n"
    return page


def show(output: Mapping[str, Any], page: Page, picture: str, alt: str) -> str:
    """One output, in the richest form that a static page can show."""
    if output["output_type"] == "stream":
        return plain(output["text"])
    if output["output_type"] == "error":
        return plain(f"{output['ename']}: {output['evalue']}")
    data = output["data"]
    if "image/png" in data:
        page.pictures[picture] = base64.b64decode(text_of(data["image/png"]))
        return f"![{alt}]({picture}){{ .nb-plot }}"
    if "image/svg+xml" in data:
        return f'<div class="nb-plot">{text_of(data["image/svg+xml"])}</div>'
    if "text/html" in data:
        return f'<div class="nb-table">{STYLE.sub("", text_of(data["text/html"]))}</div>'
    if "text/markdown" in data:
        return text_of(data["text/markdown"])
    if "application/vnd.jupyter.widget-view+json" in data:
        return WIDGET
    return plain(data.get("text/plain", ""))


def plain(text: str | list[str]) -> str:
    """Text output, without the terminal's colours."""
    clean = ANSI.sub("", text_of(text))
    return fence(clean, OUTPUT) if clean.strip() else ""


def text_of(value: str | list[str]) -> str:
    """nbformat allows a list of lines wherever it allows a text."""
    return value if isinstance(value, str) else "".join(value)
