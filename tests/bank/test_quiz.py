"""`refimpl quiz` as a person meets it, once in a process of its own; and the parts that grade and load."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from refimpl.bank.load import load, select
from refimpl.bank.progress import Progress
from refimpl.bank.question import AnswerError, Question, amount
from refimpl.bank.scope import BankError, fill, number
from refimpl.cli.main import main


def quiz(monkeypatch: pytest.MonkeyPatch, *options: str, typed: str, folder: Path) -> int:
    """The command in this process, which has torch already; its exit status."""
    monkeypatch.setenv("REFIMPL_DATA", str(folder))
    monkeypatch.setattr(sys, "argv", ["refimpl", "quiz", *options])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_a_session_is_graded_and_kept_until_the_input_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three questions, two answers: one open, one with a slip of the finger first."""
    options = ("--topic", "zero", "--form", "open", "--n", "3", "--seed", "1")
    assert quiz(monkeypatch, *options, typed="\n7\n3\n\n1\n", folder=tmp_path) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "give a number from 1 to 4" in out
    assert "1 of 2 answers right" in out
    entries = Progress(tmp_path).read()
    assert sorted((e.answered, e.right) for e in entries.values()) == [(1, 0), (1, 1)]
    assert all(load()[name].topic == "zero" for name in entries)


def test_a_number_is_asked_again_until_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--topic", "communication", "--form", "numeric", "--n", "1", "--seed", "5")
    assert quiz(monkeypatch, *options, typed="many\n12,5\n0\n", folder=tmp_path) == 0
    out = capsys.readouterr().out
    assert out.count("give a number, for example") == 2
    assert "Not quite" in out
    assert "0 of 1 answer right" in out


def test_q_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert quiz(monkeypatch, "--n", "3", "--seed", "1", typed="q\n", folder=tmp_path) == 0
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "quiz.json").exists()


def test_ctrl_c_keeps_what_was_answered(tmp_path: Path) -> None:
    environment = os.environ | {"REFIMPL_DATA": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "refimpl", "quiz", "--form", "choice", "--n", "3", "--seed", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write("1\n")
        process.stdin.flush()
        seen = ""
        while "2/3" not in seen:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            seen += line
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "1 answer right" in rest
    assert "Traceback" not in errors
    assert len(Progress(tmp_path).read()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topic", "zerro"], "there is no topic 'zerro'; did you mean zero? Choose from basics,"),
        (["--level", "boss"], "there is no level 'boss'; choose from junior,"),
        (["--form", "opn"], "did you mean open?"),
        (
            ["--topic", "basics", "--form", "order", "--level", "staff"],
            "no card has topic basics, level staff, form order",
        ),
        (["--n", "0"], "--n 0: ask for at least 1 question"),
        (["--n", "two"], "Invalid value for '--n'"),
        (["--seed", "x"], "Invalid value for '--seed'"),
    ],
)
def test_a_bad_option_is_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = quiz(monkeypatch, *options, typed="", folder=tmp_path)
    out, err = capsys.readouterr()
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_folder_that_cannot_be_written_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "folder"
    assert quiz(monkeypatch, "--form", "choice", "--seed", "1", typed="1\n", folder=folder) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "set REFIMPL_DATA" in err


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("12.5 GB", "GB", 12.5),
        ("12500MB", "GB", 12.5),
        ("1,234.5", "GB", 1234.5),
        ("8 GiB", "GB", 8 * 1.073741824),
        ("3 min", "s", 180),
        ("1.5e3 ms", "s", 1.5),
        ("40%", "pct", 40),
        ("25 GB/s", "GBs", 25),
        ("177 elements", "elements", 177),
        ("177 elements of padding", "elements", 177),
        ("1 element", "elements", 1),
        ("16 gpus", "GPUs", 16),
        ("8 micro-batches", "micro", 8),
        ("3 minutes", "s", 180),
        ("40 percent", "pct", 40),
        ("12.5 gb", "GB", 12.5),
        ("7", "", 7),
    ],
)
def test_amounts_with_units(text: str, unit: str, expected: float) -> None:
    assert amount(text, unit) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "many", "12,5 GB", "5 s", "5 apples", "5 elements", "5 Gb", "1.2.3", "nan", "-", "1 2"]
)
def test_amounts_that_cannot_be_read(text: str) -> None:
    with pytest.raises(AnswerError):
        amount(text, "GB")


def test_a_typical_slip_is_named() -> None:
    question = Question(load()["comm-all-reduce-halves"], 0)
    for factor, name in {0.5: "half of that", 8: "bits or bytes", 1000: "1000 times that"}.items():
        assert name in question.grade(f"{question.result * factor!r}").why


@pytest.mark.parametrize(
    ("x", "shown"),
    [(0, "0"), (7, "7"), (1234567, "1,234,567"), (12.0, "12"), (12.345, "12.3"), (0.012345, "0.0123"),
     (1234.5, "1,234"), (0.1 + 0.2, "0.3"), (99.96, "100")],
)  # fmt: skip
def test_numbers_have_three_digits(x: float, shown: str) -> None:
    assert number(x) == shown


def test_figures_in_texts() -> None:
    names = {"n": 1_500_000_000}
    assert (
        fill("{{ n | GB }}, {{ n | size }}, {{ n / 3e12 | time }}, {{ 1 / 4 | pct }}", names)
        == "1.5 GB, 1.5 GB, 500 µs, 25%"
    )
    for wrong in ("{{ m }}", "{{ n | parsec }}", "{{ __import__('os') }}", "{{ open('x') }}"):
        with pytest.raises(BankError):
            fill(wrong, names)


CARD = """
topic = "zero"
[[card]]
id = "a"
level = "mid"
form = "choice"
ask = "?"
short = "s"
deep = "d"
answer = "right"
follow_ups = ["why?"]
code = ["refimpl.zero.ddp:DDP"]
proof = "tests/zero/test_stages.py::test_x"
sources = ["x"]
wrong = [{ claim = "b", why = "c" }, { claim = "e", why = "f" }]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('level = "mid"', 'level = "boss"', "1.toml: card 'a': level: Input should be 'junior'"),
        ('answer = "right"', "", "answer: Field required"),
        ('ask = "?"', 'ask = "?"\nhint = "h"', "hint: Extra inputs"),
        ('form = "choice"', 'form = "numeric"\nunit = "parsec"\nnumbers = { n = [1, 2] }', "is none of B, KB"),
        (', { claim = "e", why = "f" }', "", "wrong: Tuple should have at least 2 items"),
        ('id = "a"', 'id = "A b"', "id: String should match"),
        ('topic = "zero"', 'topic = "hats"', "topic: Input should be"),
        ('level = "mid"', "level = mid", "1.toml: Invalid value"),
    ],
)
def test_a_wrong_card_names_file_card_and_field(old: str, new: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "1.toml").write_text(CARD)
    assert list(load(tmp_path)) == ["a"]
    (tmp_path / "1.toml").write_text(CARD.replace(old, new))
    with pytest.raises(BankError) as caught:
        load(tmp_path)
    assert message in str(caught.value)


def test_two_cards_of_one_name_and_an_empty_bank(tmp_path: Path) -> None:
    with pytest.raises(BankError, match="no question cards in"):
        load(tmp_path)
    for name in ("1", "2"):
        (tmp_path / f"{name}.toml").write_text(CARD)
    with pytest.raises(BankError, match=r"2.toml: card 'a' is there twice"):
        load(tmp_path)


def test_selecting() -> None:
    assert {card.form for card in select(form="bug").values()} == {"bug"}
    assert set(select()) == set(load())


def test_an_order_is_asked_with_an_example_of_its_length() -> None:
    for card in select(form="order").values():
        question = Question(card, 3)
        numbers = question.example.split()
        assert sorted(map(int, numbers)) == list(range(1, len(question.options) + 1))
        assert not any(Question(card, seed).grade(question.example).right for seed in range(40)), "as it is shown"
        with pytest.raises(AnswerError, match=f"for example {question.example}"):
            question.grade("1 2")


def test_what_they_ask_next_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also follow-ups of other topics than the one asked for, and those that are no cards."""
    monkeypatch.setenv("COLUMNS", "2000")
    reads: list[None] = []
    monkeypatch.setattr("refimpl.bank.load.load", lambda *of: reads.append(None) or load(*of))
    quiz(monkeypatch, "--form", "choice", "--n", "25", "--seed", "1", typed="1\n" * 25, folder=tmp_path)
    assert len(reads) <= 2, "what is asked, and once what is asked next: not after each answer"
    out = " ".join(capsys.readouterr().out.split())
    answered, cards = Progress(tmp_path).read(), load()
    asked = [card for card in select(form="choice").values() if card.id in answered]
    assert len(asked) > 20
    for card in asked:
        for text in card.follow_ups:
            words = Question(cards[text]).ask if text in cards else text
            assert words.replace("`", "").split("{")[0][:60].strip() in out
