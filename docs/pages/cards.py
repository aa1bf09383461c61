"""The question cards: one page to read and filter, one JSON file for the quiz."""

from collections.abc import Callable, Iterable
from typing import Any

from pages.markdown import fence, folded
from pages.source import Sources

Card = dict[str, Any]  # one of refimpl.bank.export()
Render = Callable[[str], str]  # Markdown -> HTML
PLACE = "cards.md"
LEVELS = ("junior", "mid", "senior", "staff")
HEAD = """\
---
hide: [navigation, toc]
---

# Cards

{count} questions of the kind that interviews ask, each with the 30-second answer, the derivation, common wrong answers
and the test that proves it, or the paper. Every figure is computed by the code when this page is built.
[The quiz](quiz.md) asks them.

<form class="card-filter" hidden>
<label>topic {topics}</label>
<label>level {levels}</label>
<label>form {forms}</label>
<label>words <input name="words" type="search" autocomplete="off"></label>
<output></output>
</form>
"""


def page(cards: list[Card], sources: Sources) -> str:
    """All cards as Markdown, by topic, then by level."""
    topics = list(dict.fromkeys(card["topic"] for card in cards))
    forms = sorted({card["form"] for card in cards})
    parts = [HEAD.format(count=len(cards), topics=_select("topic", topics), levels=_select("level", LEVELS),
                         forms=_select("form", forms))]  # fmt: skip
    for topic in topics:
        mine = sorted((c for c in cards if c["topic"] == topic), key=lambda c: LEVELS.index(c["level"]))
        parts.append(f'<section class="topic" markdown>\n\n## {topic.replace("-", " ").capitalize()}')
        parts += [_card(card, sources) for card in mine]
        parts.append("</section>")
    return "\n\n".join(parts) + "\n"


def questions(cards: list[Card], render: Render) -> list[Card]:
    """What the quiz needs of each card, its texts as HTML."""
    return [
        {key: card[key] for key in ("id", "topic", "level", "form")}
        | {"variants": _distinct(_question(seen, card, render) for seen in card.get("variants", [card]))}
        for card in cards
    ]


def _card(card: Card, sources: Sources) -> str:
    question, _, rest = card["ask"].partition("\n\n")
    marks = " ".join(f"<span>{card[key]}</span>" for key in ("level", "form"))
    data = " ".join(f'data-{key}="{card[key]}"' for key in ("topic", "level", "form"))
    parts = [
        f'<div class="card" {data} markdown>',
        f"### {_line(question)} {{ #{card['id']} }}",
        f'<p class="badges">{marks}</p>',
        rest,
        fence(card["snippet"], "python") if "snippet" in card else "",
        _task(card) if "task" in card else "",
        "\n".join(f"1. {option}" for option in card.get("options", [])),
        folded("answer", "Answer", _answer(card, sources)),
        "</div>",
    ]
    return "\n\n".join(part for part in parts if part)


def _answer(card: Card, sources: Sources) -> str:
    """Short, long, what is wrong with other answers, and where to look."""
    parts = []
    if card["form"] == "order":
        parts.append("In order:\n\n" + "\n".join(f"1. {card['options'][i]}" for i in card["right"]))
    elif card["form"] not in ("open", "code"):
        parts.append(f"**{card['answer']}**")
    parts += [card["short"], card["deep"]]
    if "fixed" in card:
        parts.append("Mended:\n\n" + fence(card["fixed"], "python"))
    wrong = [f"- *{_line(answer['claim'])}*  \n    {_line(answer['why'])}" for answer in card["wrong"]]
    asked = [(to["id"], _line(to["text"].split("\n\n")[0])) for to in card["follow_ups"]]
    onward = [f"- [{text}](#{card_id})" if card_id else f"- {text}" for card_id, text in asked]
    parts += ["**Common wrong answers**", "\n".join(wrong), "**And then they ask**", "\n".join(onward)]
    for name, links in (("Code", card["code"]), ("Proof", card["proof"])):
        if name == "Code" and not links:
            continue
        shown = [f"[`{link['name']}`]({sources.link(link['file'], PLACE, link['line'])})" for link in links]
        parts.append(f"{name}: {', '.join(shown) or 'literature, see the sources'}")
    parts.append(f"Sources: {'; '.join(card['sources'])}")
    return "\n\n".join(parts)


def _question(seen: Card, card: Card, render: Render) -> Card:
    """One draw of a card."""
    ask = seen["ask"] + ("\n\n" + fence(card["snippet"], "python") if "snippet" in card else "")
    ask += "\n\n" + _task(card) if "task" in card else ""
    shown: Card = {"ask": render(ask), "short": render(seen["short"]), "deep": render(seen["deep"])}
    if "task" in card:
        shown["task"] = card["task"]
    if "options" in seen:
        shown |= {"options": [render(option) for option in seen["options"]], "right": seen["right"]}
    if card["form"] in ("choice", "bug"):
        reasons = {wrong["claim"]: wrong["why"] for wrong in seen["wrong"]}
        shown["why"] = [render(reasons.get(option, "")) for option in seen["options"]]
    if card["form"] == "numeric":
        unit = seen["answer"].partition(" ")[2]
        shown |= {"answer": seen["answer"], "value": seen["value"], "unit": unit, "tolerance": seen["tolerance"]}
    return shown


def _task(card: Card) -> str:
    """What live coding asks for, where it is written, and what grades it."""
    given, command = fence(card["stub"], "python"), fence(card["command"], "bash")
    return f"{given}\n\nWrite it in `{card['file']}` of your clone. This grades it:\n\n{command}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _distinct(draws: Iterable[Card]) -> list[Card]:
    found: list[Card] = []
    for draw in draws:
        if draw not in found:
            found.append(draw)
    return found


def _select(name: str, values: Iterable[str]) -> str:
    options = "".join(f"<option>{value}</option>" for value in values)
    return f'<select name="{name}"><option value="">all</option>{options}</select>'
