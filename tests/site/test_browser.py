"""A reader's walk in a real browser: pages, formulas, diagrams, search, the quiz; and no request leaves the host."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, missing, requested

pytestmark = [pytest.mark.xdist_group("site"), pytest.mark.skipif(bool(missing()), reason=missing())]
SECONDS = 20
KEY = "zero-from-scratch-quiz-1"  # of localStorage
QUESTIONS = "assets/questions.json"


@pytest.fixture(scope="module")
def one_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Started once: that takes longer than what most tests do in it."""
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def browser(one_browser: Any, address: str, searched: str) -> Iterator[Any]:
    """As if new. Whatever a test does in it: no request to another host, no error in the page."""
    one_browser.get("about:blank")
    one_browser.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": address, "storageTypes": "all"})
    one_browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    one_browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    for log in ("performance", "browser"):
        one_browser.get_log(log)
    yield one_browser
    own = (address, searched, "data:", "blob:", "about:", "chrome:")
    assert [url for url in requested(one_browser) if not url.startswith(own)] == []
    assert [entry["message"] for entry in one_browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def until(browser: Any, script: str, *arguments: Any) -> Any:
    """The first true value of a JavaScript expression."""
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, SECONDS, poll_frequency=0.02)  # not 0.5 s: most pages are there after a tenth
    return wait.until(lambda b: b.execute_script(f"return {script}", *arguments), script)


def find(browser: Any, selector: str) -> Any:
    """The first visible element of a CSS selector."""
    return until(browser, "[...document.querySelectorAll(arguments[0])].find(e => e.offsetParent)", selector)


def resize(browser: Any, width: int, scheme: str = "light") -> None:
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def drawn(browser: Any) -> None:
    """Every formula and diagram of this page is, and no diagram has to be scrolled."""
    until(browser, "!document.querySelector('pre.diagram, .arithmatex:not([data-done])')")
    whole = "d => d.querySelector('svg') && d.scrollWidth <= d.clientWidth"
    until(browser, f"[...document.querySelectorAll('div.diagram')].every({whole})")
    assert browser.execute_script("return document.querySelectorAll('.katex-error').length") == 0, browser.current_url


def chapters(site: Path) -> list[str]:
    return [f"course/{page.parent.name}/" for page in sorted((site / "course").glob("*/index.html"))]


def test_home_leads_to_the_chapters(browser: Any, address: str, site: Path) -> None:
    browser.get(address)
    find(browser, "article a[href='course/']").click()
    until(browser, "document.title.startsWith('Course')")
    links = browser.execute_script(
        "return [...document.querySelectorAll('article li a')].map(a => a.href).filter(a => a.includes('/course/'))"
    )
    assert links == [address + page for page in chapters(site)]
    drawn(browser)
    browser.get(links[0])
    drawn(browser)


def test_the_code_of_a_folded_cell_opens_with_a_click(browser: Any, address: str) -> None:
    browser.get(f"{address}course/00_start/")
    hidden = "[...document.querySelectorAll('details.code pre')].every(code => !code.checkVisibility())"
    assert until(browser, f"document.querySelector('details.code') && {hidden}")
    find(browser, "details.code summary").click()
    assert until(browser, "document.querySelector('details.code pre').checkVisibility()")


def test_search_finds_a_word(browser: Any, searched: str) -> None:
    browser.get(searched)
    until(browser, "document.readyState === 'complete'")
    find(browser, "input.md-search__input").send_keys("reduce-scatter")
    until(browser, "document.querySelectorAll('.md-search-result__item').length > 3")


def test_cards_are_filtered(browser: Any, address: str) -> None:
    browser.get(f"{address}cards/")
    visible = "[...document.querySelectorAll('.card')].filter(c => c.offsetParent)"
    every = until(browser, f"{visible}.length")
    find(browser, "select[name=level]").send_keys("junior")
    junior = until(browser, f"{visible}.every(c => c.dataset.level === 'junior') && {visible}.length")
    assert 0 < junior < every
    find(browser, "input[name=words]").send_keys("no card has this word")
    until(browser, f"{visible}.length === 0")


def ask(browser: Any, address: str, site: Path, form: str) -> Any:
    """Open the quiz at the first card of a form."""
    card = next(card for card in json.loads((site / QUESTIONS).read_text("utf-8")) if card["form"] == form)
    browser.get(f"{address}quiz/")
    browser.execute_script("localStorage.setItem(arguments[0], arguments[1])", KEY, json.dumps({"current": card["id"]}))
    browser.refresh()
    assert form in find(browser, ".question .badges").text
    return card


ANSWERS = {
    "choice": [".option input"],
    "bug": [".option input"],
    "order": [".order button", ".question .md-button"],
    "open": [".question .md-button", ".question .md-button"],
    "code": [".question .md-button", ".question .md-button"],
}


@pytest.mark.parametrize("form", ANSWERS)
def test_an_answer_is_graded_and_kept(browser: Any, address: str, site: Path, form: str) -> None:
    ask(browser, address, site, form)
    for selector in ANSWERS[form]:
        find(browser, selector).click()
    asked, verdict = find(browser, ".question .ask").text, find(browser, ".verdict").text
    browser.refresh()
    assert find(browser, ".question .ask").text == asked
    assert find(browser, ".verdict").text == verdict
    assert find(browser, ".quiz-progress").text.startswith("1 of ")
    find(browser, ".quiz-forward .md-button").click()
    assert find(browser, ".question .ask").text != asked


@pytest.mark.parametrize(
    ("factor", "has_unit", "verdict"), [(1, False, "Right"), (1, True, "Right"), (3, False, "Not yet")]
)
def test_a_number_is_graded(browser: Any, address: str, site: Path, factor: int, has_unit: bool, verdict: str) -> None:
    card = ask(browser, address, site, "numeric")
    draws = [question["ask"] for question in card["variants"]]
    shown = "arguments[0].findIndex(d => { ask.innerHTML = d; return ask.textContent === text })"
    script = f"(() => {{ const ask = document.querySelector('.ask'), text = ask.textContent; return {shown} + 1 }})()"
    question = card["variants"][until(browser, script, draws) - 1]
    find(browser, ".question input[type=text]").send_keys(
        f"{question['value'] * factor} {question['unit'] if has_unit else ''}"
    )
    find(browser, ".question form button").click()
    assert verdict in find(browser, ".verdict").text


def test_damaged_progress_is_set_aside(browser: Any, address: str) -> None:
    browser.get(f"{address}quiz/")
    browser.execute_script("localStorage.setItem(arguments[0], '{damaged')", KEY)
    browser.refresh()
    assert find(browser, ".quiz-progress").text.startswith("0 of ")
    assert browser.execute_script("return localStorage.getItem(arguments[0])", f"{KEY}-damaged") == "{damaged"


def fits_a_phone(browser: Any, page: str) -> None:
    browser.get(page)
    until(browser, "document.readyState === 'complete'")
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390, page


def test_pages_fit_a_phone_and_every_formula_and_diagram_is_drawn(browser: Any, address: str, site: Path) -> None:
    resize(browser, 390)
    tasks = [f"exercises/{page.parent.name}/" for page in sorted((site / "exercises").glob("*/index.html"))]
    others = ("", "cards/", "quiz/", "course/", "exercises/", "reference/refimpl.zero/", "reference/configuration/")
    for page in (*others, *chapters(site), *tasks):
        fits_a_phone(browser, address + page)
        assert browser.execute_script("return document.body.dataset.mdColorScheme") == "default"
        drawn(browser)


def test_diagrams_fit_a_desk(browser: Any, address: str, site: Path) -> None:
    resize(browser, 1300)
    pages = [page for page in chapters(site) if 'class="diagram"' in (site / page / "index.html").read_text("utf-8")]
    assert pages
    for page in pages:
        browser.get(address + page)
        drawn(browser)


def test_pages_are_dark_where_the_reader_likes_it_dark(browser: Any, address: str) -> None:
    resize(browser, 390, "dark")
    for page in ("", "course/", "quiz/"):  # all pages have the theme's one script
        fits_a_phone(browser, address + page)
        assert browser.execute_script("return document.body.dataset.mdColorScheme") == "slate"
