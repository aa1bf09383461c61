"""The quiz in a notebook: the same text each time, and widgets that grade and remember."""

from pathlib import Path

import ipywidgets
import pytest
from boxes import parts, said

from refimpl.bank.card import TOPICS
from refimpl.bank.progress import Progress
from refimpl.notebook import Quiz


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIMPL_DATA", str(tmp_path))


@pytest.mark.parametrize("topic", TOPICS)
def test_the_text_is_the_same_each_time(topic: str) -> None:
    bundles = [Quiz(topic)._repr_mimebundle_() for _ in range(2)]
    assert bundles[0]["text/markdown"] == bundles[1]["text/markdown"] == bundles[0]["text/plain"]
    assert "**5.**" in bundles[0]["text/markdown"]
    assert "application/vnd.jupyter.widget-view+json" in bundles[0]
    assert "<" not in bundles[0]["text/markdown"].replace("`", "").split("```")[0].split("import")[0]


def test_answers_do_not_change_the_text() -> None:
    before = Quiz("zero").markdown()
    for question in Quiz("zero").questions:
        Progress().record(question.card.id, "good")
    assert Quiz("zero").markdown() == before


@pytest.mark.parametrize("form", ["choice", "bug"])
def test_an_option_is_graded_once(form: str) -> None:
    quiz = Quiz("memory", form=form, n=1)
    widget = quiz.widget()
    (buttons,) = parts(widget, ipywidgets.ToggleButtons)
    buttons.value = str(quiz.questions[0].right[0] + 1)
    assert "**Right.**" in said(widget)
    assert buttons.disabled
    assert [(e.answered, e.right) for e in Progress().read().values()] == [(1, 1)]


def test_a_number_is_read_graded_and_kept() -> None:
    quiz = Quiz("memory", form="numeric", n=1)
    widget = quiz.widget()
    (field,), check = parts(widget, ipywidgets.Text), parts(widget, ipywidgets.Button)[0]
    check.click()
    assert "give a number" in said(widget)
    assert Progress().read() == {}
    field.value = str(quiz.questions[0].result)
    check.click()
    assert "**Right.**" in said(widget)
    assert len(Progress().read()) == 1


def test_an_open_question_is_graded_by_oneself() -> None:
    quiz = Quiz("zero", form="open", n=2)
    widget = quiz.widget()
    show, _, _, good, _ = (buttons := parts(widget, ipywidgets.Button))[:5]
    assert quiz.questions[0].short not in said(widget)
    show.click()
    assert quiz.questions[0].short in said(widget)
    good.click()
    assert [(e.answered, e.right) for e in Progress().read().values()] == [(1, 1)]
    buttons[-1].click()
    assert quiz.questions[1].ask in said(widget)


def test_a_topic_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="did you mean zero"):
        Quiz("zeor")
    with pytest.raises(ValueError, match="at least 1"):
        Quiz("zero", n=0)
