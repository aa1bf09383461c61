"""A quiz in a notebook: `from refimpl.notebook import Quiz`, then `Quiz("zero")` as the last line of a cell.

With a kernel it is live, and answers count in the same progress file as `refimpl quiz`. Where nothing can be clicked
(GitHub, the site, a terminal) the same questions stand there as text, their answers below. Which questions, which
numbers and which order of options depend on the arguments alone.
"""

from collections.abc import Callable
from typing import Any

from refimpl.bank.card import LEVELS, Bug, Choice, Code, Numeric, Open
from refimpl.bank.load import select
from refimpl.bank.progress import RATINGS, Progress
from refimpl.bank.question import AnswerError, Question
from refimpl.bank.scope import UNITS
from refimpl.grading.live import grade_task
from refimpl.notebook.output import shown


class Quiz:
    """`n` questions of a topic (and level and form, if given), from easy to hard."""

    def __init__(
        self, topic: str, level: str | None = None, form: str | None = None, *, n: int = 5, seed: int = 0
    ) -> None:
        """ValueError for a topic, level or form that there is not, or n below 1."""
        if n < 1:
            raise ValueError(f"n = {n}: ask for at least 1 question")
        cards = sorted(select(topic, level, form).values(), key=lambda card: LEVELS.index(card.level))
        n = min(n, len(cards))
        # Spread over the levels: every so many cards of the sorted list.
        self.questions = [Question(cards[i * len(cards) // n], seed) for i in range(n)]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """What a notebook displays: the live quiz, and the text for where there is no kernel."""
        text = self.markdown()
        view: dict[str, Any] = self.widget()._repr_mimebundle_()
        return view | {"text/plain": text, "text/markdown": text}

    def markdown(self) -> str:
        """All questions, then all answers."""
        asked = [f"**{i}.** {_whole_question(q)}" for i, q in enumerate(self.questions, 1)]
        answers = [f"**{i}.** {_answer(q)}" for i, q in enumerate(self.questions, 1)]
        return "\n\n".join([*asked, "**Answers**", *answers])

    def widget(self) -> Any:
        """An ipywidgets box: a question at a time."""
        import ipywidgets  # type: ignore[import-untyped]

        place = ipywidgets.VBox()

        def show(i: int) -> None:
            box = _Asked(self.questions[i], f"Question {i + 1} of {len(self.questions)}")
            if i + 1 < len(self.questions):
                box.add_next(lambda: show(i + 1))
            place.children = (box.box,)

        show(0)
        return place


class _Asked:
    """One question on the screen: text, a way to answer it, and what comes after."""

    def __init__(self, question: Question, title: str) -> None:
        import ipywidgets as w

        self.question, self.after = question, w.Output()
        self.next: Any = w.Button(description="Next", layout={"display": "none"})
        self.answer: Any = None
        head = w.Output(outputs=(shown(f"**{title}** · {question.card.level}\n\n{_whole_question(question)}"),))
        self.box = w.VBox([head, self._controls(w), self.after, self.next])

    def add_next(self, action: Callable[[], None]) -> None:
        self.next.layout.display = ""
        self.next.on_click(lambda _: action())

    def _controls(self, w: Any) -> Any:
        if isinstance(self.question.card, Open):
            button = w.Button(description="Show the answer")
            grades = w.HBox([w.Button(description=name, layout={"width": "auto"}) for name in RATINGS])
            grades.layout.display = "none"
            for grade in grades.children:
                grade.on_click(lambda b: self._keep(b.description, grades))

            def reveal(_: Any) -> None:
                self.after.outputs = (shown(f"{_answer(self.question)}\n\nHow was yours?"),)
                button.layout.display, grades.layout.display = "none", ""

            button.on_click(reveal)
            return w.VBox([button, grades])
        if isinstance(self.question.card, Code):
            return self._live_coding(self.question.card, w)
        if isinstance(self.question.card, Choice | Bug):
            numbers = [str(i + 1) for i in range(len(self.question.options))]
            self.answer = w.ToggleButtons(options=numbers, value=None, style={"button_width": "3em"})
            self.answer.observe(lambda _: self._check(), names="value")
            return self.answer
        self.answer = w.Text(placeholder=_placeholder(self.question), continuous_update=False)
        button = w.Button(description="Check")
        button.on_click(lambda _: self._check())
        return w.HBox([self.answer, button])

    def _live_coding(self, card: Code, w: Any) -> Any:
        """Grade exercise.py as often as asked. Only a first answer that is right counts as good."""
        failed: list[str] = []
        grade, give_up = (w.Button(description=text, layout={"width": "auto"}) for text in ("Grade it", "Give up"))
        controls = w.HBox([grade, give_up])

        def check(_: Any) -> None:
            self.after.outputs = (shown("The grader runs it on real ranks ..."),)
            verdict = grade_task(card.chapter, card.task)
            if verdict.outcome == "pass":
                self.after.outputs = (shown(f"**Right.**\n\n{_answer(self.question)}"),)
                self._keep("hard" if failed else "good", controls)
            else:
                self.after.outputs = (shown(f"**Not yet.**\n\n```\n{verdict.text}\n```"),)
                failed.extend([verdict.text] if verdict.outcome == "fail" else [])

        def leave(_: Any) -> None:
            self.after.outputs = (shown(_answer(self.question)),)
            self._keep("again", controls)

        grade.on_click(check)
        give_up.on_click(leave)
        return controls

    def _check(self) -> None:
        try:
            verdict = self.question.grade(self.answer.value or "")
        except AnswerError as reason:
            self.after.outputs = (shown(str(reason)),)
            return
        text = "**Right.**" if verdict.right else f"**Not quite.** {verdict.why}"
        self.after.outputs = (shown(f"{text}\n\n{_answer(self.question)}"),)
        self._keep("good" if verdict.right else "again", self.answer)

    def _keep(self, rating: str, controls: Any) -> None:
        """The first answer counts; what can be pressed a second time is switched off."""
        for control in getattr(controls, "children", [controls]):
            control.disabled = True
        Progress().record(self.question.card.id, rating)


def _whole_question(question: Question) -> str:
    parts = [question.ask]
    if isinstance(question.card, Bug):
        parts.append(f"```python\n{question.card.snippet.strip()}\n```")
    if question.options:
        parts.append("\n".join(f"{i}. {option}" for i, option in enumerate(question.options, 1)))
    if isinstance(question.card, Code):
        parts.append(question.task)
    return "\n\n".join(parts)


def _answer(question: Question) -> str:
    """The answer in its place (an option's number, the order, a number), the short answer, the derivation."""
    if isinstance(question.card, Open | Code):
        return f"{question.short}\n\n{question.deep}"
    given = str(question.right[0] + 1) if isinstance(question.card, Choice | Bug) else question.answer
    return f"**{given}.** {question.short}\n\n{question.deep}"


def _placeholder(question: Question) -> str:
    if isinstance(question.card, Numeric):
        unit = UNITS[question.card.unit][1] if question.card.unit else ""
        return f"a number {f'in {unit}' if unit else ''}".strip()
    return f"for example {question.example}"
