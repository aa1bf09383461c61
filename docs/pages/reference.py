"""The reference: every module's docstrings, one page a package, and the table of configuration keys."""

import ast
from collections import defaultdict
from pathlib import Path

from pages.source import Sources

INTRODUCTION = """\
# Reference

The code is the textbook: each module begins with its idea in one sentence, then bytes, traffic and the paper's section.
Imports go downwards only: a module imports from its own folder and from the floors below.

| package | idea |
| --- | --- |
"""
CONFIGURATION = """\
---
hide: [toc]
---

# Configuration keys { .wide }

`refimpl.initialize` reads DeepSpeed's JSON. Every key that DeepSpeed knows gets one of three answers:
**honoured**, **warned** (accepted, without effect, with the reason) or **rejected** (an error at once).
A value under "silent for" asks for nothing and passes without a word. This table is made by the code that answers.

"""


def packages(root: Path) -> dict[str, list[Path]]:
    """The modules of refimpl by page name: a page for each folder, one for the modules at the top."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((root / "refimpl").rglob("*.py")):
        parts = path.relative_to(root).parts
        if path.name not in ("__init__.py", "__main__.py"):
            found["refimpl" if len(parts) == 2 else ".".join(parts[:-1])].append(path)
    return dict(sorted(found.items()))


def pages(root: Path, sources: Sources) -> dict[str, str]:
    """The pages by their place on the site."""
    made, rows = {}, []
    for package, modules in packages(root).items():
        place = f"reference/{package}.md"
        idea = sentence(root / package.replace(".", "/") / "__init__.py")
        rows.append(f"| [`{breakable(package)}`]({package}.md) | {idea} |")
        parts = [f"# {package}", idea, *(module(path, root, place, sources) for path in modules)]
        made[place] = "\n\n".join(parts) + "\n"
    return {"reference/index.md": INTRODUCTION + "\n".join(rows) + "\n", **made}


def breakable(package: str) -> str:
    """Its name, which a narrow column may break at each dot."""
    return package.replace(".", ".\u200b")


def module(path: Path, root: Path, place: str, sources: Sources) -> str:
    """A module's heading, the link to its source and its docstrings."""
    relative = path.relative_to(root)
    name = ".".join(relative.with_suffix("").parts)
    link = sources.link(relative.as_posix(), place)
    return f"## {name} {{ #{name} .module-name }}\n\n[{relative.as_posix()}]({link}){{ .source-link }}\n\n::: {name}"


def sentence(path: Path) -> str:
    """The first paragraph of a file's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def configuration() -> str:
    """The page of the configuration's keys."""
    from refimpl.engine.configuration.answer import markdown, table
    from refimpl.engine.configuration.schema import DeepSpeedConfig

    return CONFIGURATION + markdown(table(DeepSpeedConfig)) + "\n"
