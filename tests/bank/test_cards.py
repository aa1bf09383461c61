"""The cards: every name they point at exists, every figure is computed, every grade is right."""

import ast
import inspect
import json
import re
from collections import Counter
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

import refimpl.bank
from refimpl.bank.card import (
    CARD,
    FORMS,
    LEVELS,
    LITERATURE,
    TOPICS,
    AnyCard,
    Bug,
    Choice,
    Code,
    Numeric,
    Open,
    Order,
    texts,
)
from refimpl.bank.load import FOLDER, load
from refimpl.bank.place import ROOT, of_code, of_test
from refimpl.bank.question import Question
from refimpl.bank.scope import PLACEHOLDER, BankError
from refimpl.grading.chapters import definitions, find_chapter

CARDS = load()
SEEDS = range(8)
every_card = pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)


def of_form(*forms: type) -> pytest.MarkDecorator:
    chosen = {name: card for name, card in CARDS.items() if isinstance(card, forms)}
    return pytest.mark.parametrize("card", chosen.values(), ids=chosen)


def test_the_bank_covers_every_topic_level_and_form() -> None:
    assert len(CARDS) >= 146
    counts = [Counter(getattr(card, what) for card in CARDS.values()) for what in ("topic", "level", "form")]
    assert all(counts[0][topic] >= 6 for topic in TOPICS)
    assert all(counts[1][level] >= 12 for level in LEVELS)
    assert all(counts[2][form] for form in FORMS)
    assert sum(isinstance(card, Numeric | Bug) for card in CARDS.values()) >= 25


def test_the_readme_counts_the_cards() -> None:
    assert re.findall(r"(\d+) cards", (ROOT / "README.md").read_text("utf-8")) == [str(len(CARDS))]


def test_each_topic_has_its_file() -> None:
    assert [file.stem[3:].replace("_", "-") for file in sorted(FOLDER.glob("*.toml"))] == list(TOPICS)
    for file in FOLDER.glob("*.toml"):
        assert f'topic = "{file.stem[3:].replace("_", "-")}"' in file.read_text().splitlines()


@every_card
def test_code_and_proof_are_there(card: AnyCard) -> None:
    if card.proof != LITERATURE:
        of_test(card.proof)
    for symbol in card.code:
        place = of_code(symbol)
        module, name = symbol.split(":")
        found = reduce(lambda owner, part: getattr(owner, part, None), name.split("."), import_module(module))
        found = inspect.unwrap(found) if callable(found) else found  # from under a decorator
        if inspect.isfunction(found) or inspect.isclass(found):
            lines, first = inspect.getsourcelines(found)
            assert (place.line, place.end) == (first, first + len(lines) - 1)
            assert Path(inspect.getsourcefile(found) or "") == ROOT / place.file


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (of_code, "refimpl.zero.zero9:Zero9", "there is no file refimpl/zero/zero9.py"),
        (of_code, "refimpl.zero.zero2:Zero2.fly", r"refimpl/zero/zero2.py has no Zero2.fly"),
        (of_test, "tests/zero/test_stages.py::test_nothing", "has no test_nothing"),
    ],
)
def test_a_name_that_is_not_there_is_an_error(find: object, name: str, message: str) -> None:
    assert callable(find)
    with pytest.raises(BankError, match=message):
        find(name)


@every_card
def test_follow_ups_lead_on(card: AnyCard) -> None:
    for text in card.follow_ups:
        assert " " in text or text in CARDS, f"{text} is no card"
        assert text != card.id


@every_card
def test_sources_are_exact(card: AnyCard) -> None:
    for source in card.sources:
        assert not source.startswith("arXiv") or re.fullmatch(r"arXiv:\d{4}\.\d{4,5}( .+)?", source)
        assert source.startswith(("arXiv", "DeepSpeed", "PyTorch", "NVIDIA", "Hugging Face")) or re.search(
            r"\b(19|20)\d\d\b", source
        ), f"{source}: who, when, where?"


# A figure typed into a text goes stale; one in {{ }} is computed. Names and small counts are no figures.
NAMED = re.compile(r"\b(ZeRO-\d|1F1B|(8|16|4|1|32)[- ]bits?\b|arXiv:\S+|2\*\*-?\d+|(19|20)\d\d)")
WITH_UNIT = re.compile(r"(?<![\w.])\d[\d.,]*\s?(%|(bytes?|[KMGT]i?B|[mµ]?s|seconds|minutes|hours|times|[TP]?FLOPs?)\b)")
LARGE = re.compile(r"(?<![\w.*])(\d{2,}|\d+\.\d+)")
COEFFICIENT = re.compile(r"\d{2,} ?[A-Za-z(]")  # in a formula: `12 L w w`


def raw_figures(text: str) -> list[str]:
    bare = NAMED.sub("", PLACEHOLDER.sub(" ", text))
    prose, code = re.sub(r"`[^`]*`", " ", bare), " ".join(re.findall(r"`[^`]*`", bare))
    code = COEFFICIENT.sub("", code)
    return [m[0] for part in (prose, code) for pattern in (WITH_UNIT, LARGE) for m in pattern.finditer(part)]


@every_card
def test_every_figure_is_computed(card: AnyCard) -> None:
    shown = {name: text for name, text in texts(card).items() if not (name.startswith("follow") and text in CARDS)}
    assert {name: raw for name, text in shown.items() if (raw := raw_figures(text))} == {}


@pytest.mark.parametrize(
    "text", ["12 ranks", "takes 3 ms", "4 bytes each", "1.5 of it", "half, 50%", "`n = 3 GB`", "`64`", "2 times"]
)
def test_a_raw_figure_is_noticed(text: str) -> None:
    assert raw_figures(text)


@pytest.mark.parametrize(
    "text", ["ZeRO-3 on N ranks", "16-bit weights", "`12 L w w` for it", "{{ 12 | GB }}", "2 to 4 ranks", "in 2019"]
)
def test_names_and_formulas_are_no_figures(text: str) -> None:
    assert raw_figures(text) == []


@every_card
def test_texts_are_complete_for_every_draw(card: AnyCard) -> None:
    for seed in SEEDS:
        facts = json.dumps(Question(card, seed).facts()).replace("\\n", " ")
        assert not re.search(r"\{\{|\}\}|(?<![-`])\b(nan|inf)\b", facts)


@every_card
def test_no_html(card: AnyCard) -> None:
    for text in texts(card).values():
        assert not re.search(r"</?[a-zA-Z]|&\w+;", re.sub(r"`[^`]*`", "", text))


def test_no_text_is_there_twice() -> None:
    seen = Counter(
        text for card in CARDS.values() for name, text in texts(card).items() if name in ("ask", "short", "deep")
    )
    assert [text for text, times in seen.items() if times > 1] == []


@of_form(Numeric)
def test_numbers_are_fresh_and_graded(card: Numeric) -> None:
    questions = [Question(card, seed) for seed in SEEDS]
    assert len({q.ask for q in questions}) > 2
    assert len({q.result for q in questions}) > 1
    for q in questions:
        assert q.answer.replace(" %", "%") in q.short or q.answer.split()[0] in q.short
        assert q.grade(f"{q.result!r}").right
        assert q.grade(q.answer).right, "the answer as shown is accepted"
        assert not q.grade(f"{q.result * 1.9!r}").right
        assert not q.grade(f"{q.result * 0.5 - 1!r}").right
        assert Question(card, q.seed).facts() == q.facts()


@of_form(Choice, Bug)
def test_every_option_is_graded_with_its_reason(card: Choice | Bug) -> None:
    for seed in range(3):
        q = Question(card, seed)
        verdicts = [q.grade(str(i + 1)) for i in range(len(q.options))]
        assert sum(v.right for v in verdicts) == 1
        assert verdicts[q.right[0]].right
        assert len({v.why for v in verdicts}) == len(verdicts)
    assert len({Question(card, seed).right[0] for seed in range(20)}) > 1, "the right one is not always in one place"


@of_form(Order)
def test_only_the_right_order_passes(card: Order) -> None:
    q = Question(card, 0)
    right = " ".join(str(i + 1) for i in q.right)
    assert [q.options[i] for i in q.right] == list(card.items)
    assert q.grade(right).right
    swapped = right.split()
    swapped[0], swapped[1] = swapped[1], swapped[0]
    verdict = q.grade(" ".join(swapped))
    assert not verdict.right
    assert card.items[0] in verdict.why
    assert not q.grade(" ".join(str(i + 1) for i in range(len(q.options)))).right, "shown in the right order"


@of_form(Code)
def test_live_coding_names_a_task_and_its_grader(card: Code) -> None:
    chapter = find_chapter(card.chapter, ROOT)
    assert card.task in chapter.tasks
    file, _, test = card.proof.partition("::")
    assert ROOT / file in chapter.graders
    assert test == f"test_{card.task}"
    assert ROOT / card.file == chapter.exercise
    given = Question(card).task
    assert f"pytest {card.proof}" in given
    tree = ast.parse(given.split("```python\n")[1].split("\n```")[0])
    (task,) = definitions(tree)
    assert ast.get_docstring(task) == ast.get_docstring(
        next(d for d in definitions(ast.parse(chapter.solution.read_text())) if d.name == card.task)
    )
    written = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    assert written
    assert all(len(f.body) - (ast.get_docstring(f) is not None) == 1 for f in written), "nothing of the solution"


def test_a_card_that_does_not_hold_together_is_refused() -> None:
    bug = next(card for card in CARDS.values() if isinstance(card, Bug) and card.proof != LITERATURE)
    for change, says in (
        ({"snippet": "pass"}, "exactly once"),
        ({"snippet": 2 * bug.snippet}, "exactly once"),
        ({"code": ()}, "code: Field required, or proof = 'literature'"),
    ):
        with pytest.raises(ValueError, match=says):
            CARD.validate_python(bug.model_dump() | change)


@of_form(Open)
def test_an_open_card_argues(card: Open) -> None:
    assert len(card.deep) > len(card.short)


def test_the_export_is_json_with_places() -> None:
    exported = refimpl.bank.export()
    assert [card["id"] for card in exported] == list(CARDS)
    assert json.loads(json.dumps(exported)) == exported
    for card in exported:
        for link in card["code"] + card["proof"]:
            lines = (ROOT / link["file"]).read_text().splitlines()
            last = re.split(r"[.:]", link["name"])[-1]
            assert last in "\n".join(lines[link["line"] - 1 : link["end"]])
        assert bool(card["proof"]) == (CARDS[card["id"]].proof != LITERATURE)
        assert all(f["id"] is None or f["id"] in CARDS for f in card["follow_ups"])
        assert len(card.get("variants", [])) == (5 if card["form"] == "numeric" else 0)
