"""A question to the reader, asked where the idea is needed: the cell below it holds the answer.

    predict("A ring all-reduce of 4 MB on 4 ranks: how much does each rank send?", 6, unit="MB", why="2n(N-1)/N")
    predict("What grows with the number of ranks?", "latency", options=["latency", "bytes"])
    predict("In which order?", ["gather", "compute", "free"], order=True)

as the last line of a cell. With a kernel it is a field and a button, and says after the first try what is right and
why. Where nothing can be clicked (GitHub, the site, a terminal) the question stands there as text, without the answer.
What one has guessed wrongly before reading it is remembered better than what one has only read (Richland, Kornell and
Kao 2009, J. Exp. Psychol. Appl. 15(3)).
"""

import random
import re
from collections.abc import Sequence
from typing import Any

from refimpl.bank.question import AnswerError, amount, unit_named
from refimpl.notebook.output import shown

CLOSE = 0.02  # of the answer: a number this near is right

Answer = float | str | Sequence[str]


class predict:
    """A number (with its unit), one of `options`, or with `order` the right order of `answer`'s items."""

    def __init__(
        self,
        question: str,
        answer: Answer,
        *,
        options: Sequence[str] = (),
        order: bool = False,
        unit: str = "",
        why: str = "",
    ) -> None:
        """`answer` is best computed by the cell. ValueError if it is none of the options, or of another kind."""
        if options and answer not in options:
            raise ValueError(f"predict: the answer {answer!r} is not among the options {list(options)}")
        if not (options or order or isinstance(answer, int | float)):
            raise ValueError(f"predict: {answer!r} is no number: give options, or order=True")
        self.question, self.answer, self.unit, self.why, self.order = question, answer, unit, why, order
        self.options = shuffled(answer) if order and not isinstance(answer, int | float) else list(options)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """What a notebook displays: the live question, and the text for where there is no kernel."""
        text = self.markdown()
        view: dict[str, Any] = self.widget()._repr_mimebundle_()
        return view | {"text/plain": text, "text/markdown": text}

    def markdown(self) -> str:
        """The question, without its answer."""
        lines = [f"**Predict.** {self.question}"]
        lines += [f"{i}. {option}" for i, option in enumerate(self.options, 1)]
        return "\n\n".join([lines[0], "\n".join(lines[1:])]).strip()

    def verdict(self, said: str) -> str:
        """What the reader is told for an answer as typed: a number, an option's number, or the numbers in order."""
        given = self._read(said)
        if given is None:
            return self._help()
        right = given == self._right() if self.options else abs(given - self._right()) <= CLOSE * abs(self._right())
        return f"**{'Yes' if right else 'Not quite'}: {self._shown()}.** {self.why}".strip()

    def _right(self) -> Any:
        if self.order:
            return [self.options.index(item) + 1 for item in self._items()]
        return self.options.index(str(self.answer)) + 1 if self.options else self.answer

    def _items(self) -> Sequence[str]:
        assert not isinstance(self.answer, int | float)
        return self.answer

    def _read(self, said: str) -> Any:
        if self.options:
            places, there = [int(n) for n in re.findall(r"\d+", said)], range(1, len(self.options) + 1)
            if self.order:
                return places if sorted(places) == list(there) else None
            return places[0] if len(places) == 1 and places[0] in there else None
        try:
            return amount(said, unit_named(self.unit))
        except AnswerError:
            return None

    def _shown(self) -> str:
        if self.order:
            return ", then ".join(self._items())
        return str(self.answer) if self.options else f"{self.answer:,.6g} {self.unit}".strip()

    def _help(self) -> str:
        if self.order:
            return f"Give all {len(self.options)} numbers once each, for example {numbers_of(self.options)}."
        if self.options:
            return f"Give one number from 1 to {len(self.options)}."
        return f"Give one number{f' in {self.unit}' if self.unit else ''}."

    def widget(self) -> Any:
        """An ipywidgets box: question, field, verdict. The first answer that can be read stays."""
        import ipywidgets as w  # type: ignore[import-untyped]

        after = w.Output()
        head = w.Output(outputs=(shown(self.markdown()),))
        field: Any = w.Text(placeholder=self._help().rstrip("."), layout={"width": "24em"}, continuous_update=False)
        button = w.Button(description="Commit", layout={"width": "auto"})
        if self.options and not self.order:
            places = [str(i + 1) for i in range(len(self.options))]
            field = w.ToggleButtons(options=places, value=None, style={"button_width": "3em"})

        def commit(_: Any = None) -> None:
            said = field.value or ""
            after.outputs = (shown(self.verdict(said)),)
            field.disabled = button.disabled = self._read(said) is not None

        button.on_click(commit)
        if self.options and not self.order:
            field.observe(commit, names="value")
            return w.VBox([head, field, after])
        return w.VBox([head, w.HBox([field, button]), after])


def shuffled(answer: str | Sequence[str]) -> list[str]:
    """The items in another order, the same each time."""
    items = list(answer)
    if len(set(items)) < max(2, len(items)):
        raise ValueError(f"predict: an order needs two items or more, each once, not {items}")
    chance, mixed = random.Random(" ".join(items)), items.copy()
    while mixed == items:
        chance.shuffle(mixed)
    return mixed


def numbers_of(options: Sequence[str]) -> str:
    return " ".join(str(len(options) - i) for i in range(len(options)))
