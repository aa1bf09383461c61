"""What the cards cite is on the list of sources.toml, which says what each is and what was looked up."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from refimpl.bank.load import load

ROOT = Path(__file__).parents[2]
LIST: dict[str, Any] = tomllib.loads(Path(__file__).with_name("sources.toml").read_text("utf-8"))
CITED = {source: card.id for card in load().values() for source in card.sources}


def keys(source: str) -> list[tuple[str, str]]:
    """Where a citation stands in the list: (table, entry) of everything that it names."""
    if found := re.fullmatch(r"arXiv:(\d{4}\.\d{4,5})( .+)?", source):
        return [("arXiv", found[1])]
    if found := re.fullmatch(r"DeepSpeed issues? (\d+(?: and \d+)*)", source):
        return [("deepspeed_issues", number) for number in found[1].split(" and ")]
    if found := re.fullmatch(r"DeepSpeed until ([\d.]+): (\w+/[\w/]+\.py)", source):
        return [("deepspeed_removed", found[2]), ("deepspeed_removed", f"{found[2]} {found[1]}")]
    if found := re.fullmatch(r"(DeepSpeed|PyTorch source): (\w+/[\w/]+\.py)(?:, (\w+))?", source):
        table = "deepspeed_files" if found[1] == "DeepSpeed" else "torch_files"
        return [(table, found[2]), *([(table, f"{found[2]} {found[3]}")] if found[3] else [])]
    return [("documents", source)]


def listed() -> set[tuple[str, str]]:
    known = {("documents", text) for texts in LIST["documents"].values() for text in texts}
    for table in ("arXiv", "deepspeed_issues"):
        known |= {(table, name) for name in LIST[table]}
    for table in ("deepspeed_files", "deepspeed_removed", "torch_files"):
        for file, names in LIST[table].items():
            known |= {(table, file), *((table, f"{file} {name}") for name in names)}
    return known


def test_every_source_is_on_the_list_and_the_list_has_no_other() -> None:
    cited = {key: card for source, card in CITED.items() for key in keys(source)}
    assert {key: card for key, card in cited.items() if key not in listed()} == {}
    assert listed() - set(cited) == set()


def sections(source: str) -> list[str]:
    """ "arXiv:1910.02054 sections 5.1 and 7, and figure 1" -> ["5.1", "7", "figure 1"]."""
    _, _, places = source.partition(" ")
    return [" ".join(filter(None, found)) for found in re.findall(r"(figure|appendix)?\s?\b([\d.]*\d|[A-Z])\b", places)]


def test_sections_of_a_citation_are_read() -> None:
    assert sections("arXiv:1910.02054 sections 5.1, 5.2 and 7.2.1") == ["5.1", "5.2", "7.2.1"]
    assert sections("arXiv:2204.02311 section 4.1 and appendix B") == ["4.1", "appendix B"]
    assert sections("arXiv:1910.02054") == []


def test_every_section_was_looked_up() -> None:
    """Of a paper whose text could not be seen a card cites none."""
    cited: dict[str, set[str]] = {}
    for source in CITED:
        if source.startswith("arXiv:") and sections(source):
            cited.setdefault(source[6:16], set()).update(sections(source))
    assert cited == {number: set(seen) for number, seen in LIST["sections"].items()}


@pytest.mark.parametrize("chapter", LIST["figures"])
def test_a_chapter_says_what_was_looked_up(chapter: str) -> None:
    text = (ROOT / "course" / f"{chapter}.py").read_text("utf-8").replace("\n# ", " ")
    assert [figure for figure in LIST["figures"][chapter] if figure not in text] == []


@pytest.mark.parametrize(
    "source",
    [
        "arXiv:1910.02055",
        "DeepSpeed issue 1",
        "DeepSpeed: deepspeed/runtime/engine.py, gone",
        "DeepSpeed until 0.19.7: deepspeed/compression/utils.py",
        "PyTorch documentation: x",
    ],
)
def test_a_source_that_is_not_listed_is_noticed(source: str) -> None:
    assert not set(keys(source)) <= listed()


def test_each_title_has_authors_and_a_year_that_fits_its_number() -> None:
    for number, title in LIST["arXiv"].items():
        (year,) = re.findall(r" (20\d\d), ", title)
        assert year == f"20{number[:2]}", title


def test_files_of_torch_are_there() -> None:
    for file, names in LIST["torch_files"].items():
        path = Path(torch.__file__).parents[1] / file
        assert all(name in path.read_text("utf-8") for name in names)


DEEPSPEED = getattr(find_spec("deepspeed"), "origin", None)  # None also for a mere folder of that name


@pytest.mark.skipif(DEEPSPEED is None, reason="DeepSpeed is not installed")
def test_files_of_deepspeed_are_there() -> None:
    assert DEEPSPEED
    for file, names in LIST["deepspeed_files"].items():
        text = (Path(DEEPSPEED).parents[1] / file).read_text("utf-8")
        assert all(name in text for name in names), file
    for file in LIST["deepspeed_removed"]:
        assert not (Path(DEEPSPEED).parents[1] / file).exists()
