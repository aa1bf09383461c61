"""Small pieces of Markdown, and the way from a path in the repository to a page of the site."""

import posixpath
import re
from collections.abc import Callable

from markdown import Extension, Markdown
from markdown.inlinepatterns import SimpleTextInlineProcessor

CELL = re.compile(r"<t([dh])(\s[^>]*)?>(?=(.*?)</t\1>)", re.DOTALL)  # of a table: its text is looked at, not taken
LONG = 16  # characters: more of them in a column as narrow as a phone would leave it are read word by word
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?(?=[)\s])")


def fence(text: str, info: str = "") -> str:
    """A code block around `text`, its fence longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    bar = "`" * (longest + 1)
    return f"{bar}{info}\n{text.rstrip()}\n{bar}"


def folded(kind: str, label: str, body: str) -> str:
    """A block that opens with a click."""
    indented = re.sub(r"(?m)^(?=.)", "    ", body)
    return f'??? {kind} "{label}"\n\n{indented}'


def heading(markdown: str) -> str:
    """The first heading. ValueError without one: a page needs a title."""
    found = re.search(r"(?m)^# +(.+?)\s*$", markdown)
    if found is None:
        raise ValueError(f"no '# title' in a page that begins with {markdown[:60]!r}")
    return found[1]


def title(name: str) -> str:
    """A chapter's file name for people: `05_zero2` -> `05 ZeRO-2`."""
    number, _, words = name.partition("_")
    named = re.sub(r"zero(\d)", r"ZeRO-\1", words.replace("_", " "))
    named = re.sub(r"\b(ddp|d)\b", lambda word: word[0].upper(), named).replace("moe", "MoE")
    return f"{number} {named[:1].upper()}{named[1:]}"


def relative(place: str, page: str) -> str:
    """The link from `page` to `place`, both counted from the site's root."""
    return posixpath.relpath(place, posixpath.dirname(page) or ".")


def relink(markdown: str, folder: str, home: Callable[[str], str | None]) -> str:
    """Point links that are right in the repository's `folder` at the site.

    `home` answers for a path of the repository with the new link, or None: such a link stays as it is, and
    `--strict` reports it if it leads nowhere.
    """

    def moved(match: re.Match[str]) -> str:
        new = home(posixpath.normpath(posixpath.join(folder, match["target"])))
        return match[0] if new is None else new + (match["anchor"] or "")

    return LINK.sub(moved, markdown)


def mark_long_cells(html: str) -> str:
    """Cells of tables that have much to say get `data-long`: site.css gives their columns room on a phone."""

    def marked(cell: re.Match[str]) -> str:
        kind, attributes, text = cell.groups()
        is_long = len(re.sub(r"<[^>]*>", "", text).strip()) > LONG
        return f"<t{kind}{attributes or ''}{' data-long' if is_long else ''}>"

    return CELL.sub(marked, html)


class Dunders(Extension):
    """`pipe/__init__.py` in a docstring is a file's name. Markdown would make `init` bold, and drop the rest."""

    def extendMarkdown(self, md: Markdown) -> None:
        after_code, name = 70, SimpleTextInlineProcessor(r"(__[a-z_]+__)", md)  # and before emphasis
        md.inlinePatterns.register(name, "dunder", after_code)
