"""Turns what the repository already has (notebooks, solutions, cards, docstrings, README) into pages of the site.

MkDocs calls `on_startup` once, `on_config` and `on_files` at each build, `on_page_markdown` and `on_page_content` for
each page; `pages/` does the work.
"""

import gc
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from markdown import Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pages import cards, exercises, notebook, reference
from pages.markdown import Dunders, heading, mark_long_cells, relative, relink
from pages.source import Sources, commit_of

from refimpl.bank import export
from refimpl.grading.chapters import chapters

ROOT = Path(__file__).resolve().parent.parent
README_PART = re.compile(r"<!-- README: (.+?) -->")
PICTURE = re.compile(r"(?m)^!\[.*\]\(.*\)\n")  # alone on its line
COURSE = """\
# Course

Each chapter is a notebook that starts real processes. It measures a pain, shows the idea, builds it in small cells,
reads the code that does it in earnest, counts its bytes, breaks it once, and ends with exercises and cards.
The pages here show the notebooks as they ran.

```mermaid
flowchart LR
  DDP["<b>DDP</b><br>every rank keeps all"] --> Z1["<b>ZeRO-1</b><br>shards the optimizer"]
  Z1 --> Z2["<b>ZeRO-2</b><br>then the gradients"] --> Z3["<b>ZeRO-3</b><br>then the parameters"]
```

"""
Made = dict[str, str | bytes]  # place on the site -> Markdown, or a file's content


def on_startup(**_: Any) -> None:
    """A sixth of a build would go to looking for garbage among 800 pages that all stay."""
    gc.set_threshold(200_000)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add what cannot be said in mkdocs.yml."""
    config.markdown_extensions.append(Dunders())  # Markdown takes names and objects
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, then replace each folder in `nav` by its pages."""
    sources = Sources(ROOT, config.extra["repository"], commit_of(ROOT))
    bank = export()
    html = Markdown(extensions=config.markdown_extensions, extension_configs=config.mdx_configs)
    made: Made = {
        **course(sources),
        **exercise_pages(sources),
        **reference.pages(ROOT, sources),
        "reference/configuration.md": reference.configuration(),
        cards.PLACE: cards.page(bank, sources),
        "assets/questions.json": json.dumps(cards.questions(bank, lambda text: html.reset().convert(text))),
    }
    made |= sources.pages()  # last: the pages above cite them
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    config.nav = [unfold(entry, list(made)) for entry in config.nav or []]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the part of README.md that begins with WORDS in the place of `<!-- README: WORDS -->`."""
    return README_PART.sub(lambda match: readme(match[1]), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the code of a source file below its head; its lines are places that links may lead to. Mark long cells."""
    code = Sources(ROOT, "", "").below(page.file.src_uri)
    if page.present_anchor_ids is not None:
        page.present_anchor_ids |= set(re.findall(r'id="(L\d+)"', code))
    return mark_long_cells(html) + code


def course(sources: Sources) -> Made:
    """Each chapter as a page, its pictures, and the notebook itself to download."""
    made: Made = {}
    for path in sorted((ROOT / "course").glob("*.ipynb")):
        place = f"course/{path.stem}.md"
        page = notebook.convert(json.loads(path.read_text("utf-8")), path.stem)
        text = relink(page.markdown, "course", partial(home, page=place, sources=sources))
        made[place] = offer(text, path.stem)
        made[f"course/{path.name}"] = path.read_bytes()
        made |= {f"course/{name}": picture for name, picture in page.pictures.items()}
    rows = [f"- [{heading(str(text))}]({Path(place).name})" for place, text in made.items() if place.endswith(".md")]
    return {"course/index.md": COURSE + "\n".join(rows) + "\n", **made}


def offer(chapter: str, name: str) -> str:
    """Below the chapter's title: the notebook to download and the exercises that go with it."""
    links = [f"[Download the notebook]({name}.ipynb){{ download }}"]
    if (ROOT / "solutions" / f"{name}.py").is_file():
        links.append(f"[Exercises](../exercises/{name}.md)")
    line = " · ".join(links) + "\n{ .offer }"
    return re.sub(r"(?m)\A(\s*# .*)$", lambda match: f"{match[1]}\n\n{line}", chapter, count=1)


def exercise_pages(sources: Sources) -> Made:
    """The list of exercises and a page for each chapter's."""
    found = chapters(ROOT)
    made: Made = {"exercises/index.md": exercises.index(found)}
    for chapter in found:
        place = f"exercises/{chapter.name}.md"
        made[place] = relink(exercises.page(chapter), "solutions", partial(home, page=place, sources=sources))
    return made


def home(path: str, page: str, sources: Sources) -> str | None:
    """Where `page` finds a path of the repository; None if the site has nothing for it."""
    folder, _, name = path.partition("/")
    if folder == "course" and path.endswith((".ipynb", ".py")):
        return relative(f"course/{Path(name).stem}.md", page)
    if folder == "exercises":
        chapter = name.split("/")[0]
        return relative(f"exercises/{chapter if chapter[:1].isdigit() else 'index'}.md", page)
    if folder == "interview_bank":
        return relative(cards.PLACE, page)
    if folder == "docs":
        return relative(name, page)
    return sources.link(path, page) if (ROOT / path).is_file() else None


def readme(words: str) -> str:
    """The part of README.md that begins with `words` and ends at the next heading, without its pictures."""
    text = (ROOT / "README.md").read_text("utf-8")
    part = re.search(rf"^\W*{re.escape(words)}.*?(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    if part is None:
        raise ValueError(f"a page in docs/ shows what README.md says under {words!r}, but nothing there begins so")
    return PICTURE.sub("", part[0]).replace("](docs/", "](")


def unfold(entry: Any, places: list[str]) -> Any:
    """A `nav` entry; the name of a folder (`course/`) becomes the list of its pages."""
    if isinstance(entry, dict):
        return {title: unfold(inner, places) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [unfold(inner, places) for inner in entry]
    if not entry.endswith("/"):
        return entry
    return [named(place) for place in places if place.startswith(entry) and place.endswith(".md")]


def named(place: str) -> str | dict[str, str]:
    """A package's page gets a name that a narrow menu may break at each dot: cut off, seven would look alike."""
    package = Path(place).stem
    return {reference.breakable(package): place} if "." in package else place
