"""`predict`: what it shows, what it takes for an answer, what it says."""

from typing import Any

import ipywidgets
import pytest
from boxes import parts

from refimpl.notebook import predict

NUMBER = predict("How much does each rank send?", 6.0, unit="MB", why="2n(N-1)/N")
CHOICE = predict("What grows with N?", "latency", options=["bytes", "latency"])
ORDER = predict("In which order?", ["gather", "compute", "free"], order=True)
RIGHT = " ".join(str(ORDER.options.index(item) + 1) for item in ("gather", "compute", "free"))


@pytest.mark.parametrize("asked", [NUMBER, CHOICE, ORDER])
def test_the_text_asks_and_does_not_tell(asked: predict) -> None:
    bundle = asked._repr_mimebundle_()
    assert bundle["text/plain"] == bundle["text/markdown"] == asked.markdown()
    assert asked.question in bundle["text/plain"]
    assert "6" not in bundle["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert ORDER.options != ["gather", "compute", "free"]


@pytest.mark.parametrize(
    ("asked", "said", "told"),
    [
        (NUMBER, "6 MB", "**Yes: 6 MB.** 2n(N-1)/N"),
        (NUMBER, "6.05", "**Yes: 6 MB.**"),
        (NUMBER, "8", "**Not quite: 6 MB.** 2n(N-1)/N"),
        (NUMBER, "6,000 KB", "**Yes: 6 MB.**"),
        (NUMBER, "6 GB", "**Not quite: 6 MB.**"),
        (NUMBER, "six", "Give one number in MB."),
        (NUMBER, "1 or 2", "Give one number in MB."),
        (CHOICE, "2", "**Yes: latency.**"),
        (CHOICE, "1", "**Not quite: latency.**"),
        (CHOICE, "3", "Give one number from 1 to 2."),
        (ORDER, "1 1 2", "Give all 3 numbers once each"),
        (ORDER, RIGHT, "**Yes: gather"),
        (ORDER, "1 2 3", "**Not quite: gather, then compute, then free.**"),
    ],
)  # fmt: skip
def test_an_answer_as_typed_is_judged(asked: predict, said: str, told: str) -> None:
    assert asked.verdict(said).startswith(told)


def test_the_first_answer_that_can_be_read_stays() -> None:
    box = NUMBER.widget()
    (field,), (button,), (_, after) = (
        parts(box, ipywidgets.Text),
        parts(box, ipywidgets.Button),
        parts(box, ipywidgets.Output),
    )
    button.click()
    assert not field.disabled
    field.value = "8"
    button.click()
    assert field.disabled
    assert "Not quite" in after.outputs[0]["data"]["text/markdown"]
    choice = CHOICE.widget()
    (places,) = parts(choice, ipywidgets.ToggleButtons)
    places.value = "2"
    assert places.disabled


@pytest.mark.parametrize(
    ("answer", "options", "complaint"),
    [("c", {"options": ["a", "b"]}, "among the options"), ("six", {}, "is no number"), (["a"], {"order": True}, "two")],
)
def test_what_cannot_be_asked_is_refused(answer: Any, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        predict("?", answer, **options)
