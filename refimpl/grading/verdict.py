"""How an exercise was graded."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "fail", "todo"]


@dataclass(frozen=True)
class Verdict:
    """`text` is what the learner reads: its first line tells the mistake."""

    task: str
    outcome: Outcome
    text: str = ""
    whole_file: bool = False  # the file cannot be read: the same for all of its tasks

    @property
    def headline(self) -> str:
        return self.text.partition("\n")[0]
