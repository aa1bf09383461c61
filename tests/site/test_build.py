"""What the built site holds: every chapter, task, card and key, no broken link, nothing from another host."""

import gzip
import html
import json
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from refimpl.bank import export
from refimpl.engine.configuration.answer import table
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.grading.chapters import chapters

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("site")
LOADS = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}
COLOURS = re.compile(r'<span class="\w+">|</span>')  # of code: nine of ten tags, of no interest here


class Reader(HTMLParser):
    """The ids of a page, where its links lead and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(COLOURS.sub("", text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if LOADS.get(tag, "") in found:
            self.loads.append(found[LOADS[tag]])


@cache
def read(page: Path) -> Reader:
    return Reader(page.read_text("utf-8"))


def pages(site: Path) -> Iterator[Path]:
    """All but the error page, which cannot know where it will stand."""
    return (page for page in site.rglob("*.html") if page.name != "404.html")


def is_elsewhere(address: str) -> bool:
    return address.startswith(("http:", "https:", "//"))


def test_home_opens_with_the_picture_and_three_doors(site: Path) -> None:
    text = (site / "index.html").read_text("utf-8")
    places = [text.index(sign) for sign in ('src="images/demo.png"', 'class="doors"', "<table>")]
    assert places == sorted(places)
    doors = text[places[1] : places[2]]
    assert [re.sub(r"<[^>]+>", "", door) for door in re.findall(r"<dt>.*?</dt>", doors)] == [
        "Learn",
        "Practise",
        "Lift it into your code",
    ]


def test_every_chapter_has_a_page_with_its_notebook(site: Path) -> None:
    for notebook in (ROOT / "course").glob("*.ipynb"):
        assert (site / "course" / notebook.stem / "index.html").is_file()
        assert (site / "course" / notebook.name).read_bytes() == notebook.read_bytes()


def test_every_task_has_a_heading_and_a_folded_solution(site: Path) -> None:
    for chapter in chapters(ROOT):
        page = site / "exercises" / chapter.name / "index.html"
        text = page.read_text("utf-8")
        assert set(chapter.tasks) <= read(page).ids
        assert text.count("<summary>Solution</summary>") == len(chapter.tasks)
        assert '<details class="answer" open' not in text


def test_every_card_is_shown_and_asked(site: Path) -> None:
    cards = {card["id"] for card in export()}
    assert cards <= read(site / "cards" / "index.html").ids
    asked = re.findall(r'"id": "([^"]+)"', (site / "assets" / "questions.json").read_text("utf-8"))
    assert set(asked) == cards
    assert len(asked) == len(cards)


def test_live_coding_shows_the_task_and_what_grades_it(site: Path) -> None:
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "cards" / "index.html").read_text("utf-8")))
    quiz = json.loads((site / "assets" / "questions.json").read_text("utf-8"))
    coding = [card for card in export() if card["form"] == "code"]
    assert coding
    for card in coding:
        asked = next(q for q in quiz if q["id"] == card["id"])["variants"][0]["ask"]
        for text in (page, html.unescape(re.sub(r"<[^>]+>", "", asked))):
            assert card["command"] in text
            assert card["file"] in text
            assert card["stub"].splitlines()[0] in text


def test_every_configuration_key_is_in_the_table(site: Path) -> None:
    text = (site / "reference" / "configuration" / "index.html").read_text("utf-8")
    assert [key for key in table(DeepSpeedConfig) if f"<code>{key}</code>" not in text] == []


def test_every_module_is_in_the_reference(site: Path) -> None:
    shown = set().union(*(read(page).ids for page in (site / "reference").rglob("*.html")))
    modules = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "refimpl").rglob("*.py")]
    names = {".".join(path.parts) for path in modules if not path.name.startswith("__")}
    assert names <= shown


def test_a_proof_leads_to_the_line_of_its_test(site: Path) -> None:
    links = read(site / "cards" / "index.html").links
    for proof in (proof for card in export() for proof in card["proof"]):
        assert f"../source/{proof['file']}/#L{proof['line']}" in links
        text = (site / "source" / proof["file"] / "index.html").read_text("utf-8")
        lines = re.findall(r'<span id="L\d+" class="line">(.*?)\n</span>', text)
        shown = html.unescape(re.sub(r"<[^>]+>", "", "\n".join(lines[proof["line"] - 1 : proof["end"]])))
        assert f"def {proof['name'].split('::')[1]}(" in shown


def test_links_lead_somewhere(site: Path) -> None:
    broken = []
    for page in pages(site):
        for link in read(page).links:
            if is_elsewhere(link) or link.startswith("mailto:"):
                continue
            path, anchor = urldefrag(unquote(link))
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target.suffix == ".html" and anchor not in read(target).ids):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    foreign = [(page.name, load) for page in pages(site) for load in read(page).loads if is_elsewhere(load)]
    assert foreign == []
    styles = "".join(path.read_text("utf-8") for path in site.rglob("*.css"))
    assert [url for url in re.findall(r"url\(([^)]+)\)", styles) if is_elsewhere(url.strip("\"'"))] == []


def test_a_notebook_makes_a_light_page(site: Path) -> None:
    sent = {page.parent.name: len(gzip.compress(page.read_bytes())) for page in (site / "course").glob("*/index.html")}
    assert {name: size for name, size in sent.items() if size > 40_000} == {}
