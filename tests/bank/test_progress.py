"""Progress is kept after each answer, comes back when due, and is never lost: not by a damaged file, not half-way."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from refimpl import userdata
from refimpl.bank.load import load
from refimpl.bank.progress import Progress, choose

NOW = datetime(2030, 1, 1, tzinfo=UTC)
CARDS = list(load().values())[:6]
FIRST, SECOND, THIRD, *_ = (card.id for card in CARDS)


def test_an_answer_is_counted_and_comes_back(tmp_path: Path) -> None:
    progress = Progress(tmp_path)
    progress.record(FIRST, "good", NOW)
    progress.record(FIRST, "again", NOW + timedelta(days=1))
    progress.record(SECOND, "easy", NOW)
    entries = Progress(tmp_path).read()
    assert {name: (e.answered, e.right) for name, e in entries.items()} == {FIRST: (2, 1), SECOND: (1, 1)}
    assert entries[FIRST].due < entries[SECOND].due, "what was known comes back later"


def test_each_right_answer_lengthens_the_interval(tmp_path: Path) -> None:
    progress, now, waits = Progress(tmp_path), NOW, []
    for _ in range(5):
        entry = progress.record(FIRST, "good", now)
        waits.append(entry.due - now)
        now = entry.due
    assert waits == sorted(waits)
    assert waits[-1] > timedelta(days=7)


def test_due_cards_come_first_then_new_ones_then_what_is_due_soonest(tmp_path: Path) -> None:
    progress = Progress(tmp_path)
    progress.record(FIRST, "again", NOW - timedelta(days=2))
    progress.record(SECOND, "again", NOW - timedelta(days=3))
    progress.record(THIRD, "easy", NOW)
    chosen = [card.id for card in choose(CARDS, progress.read(), 99, seed=0, now=NOW)]
    assert chosen[:2] == [SECOND, FIRST]
    assert chosen[-1] == THIRD
    assert sorted(chosen) == sorted(card.id for card in CARDS)
    assert chosen == [card.id for card in choose(CARDS, progress.read(), 99, seed=0, now=NOW)]
    assert len(choose(CARDS, {}, 2, seed=0)) == 2


GOOD = {
    "card_id": 1,
    "state": 1,
    "step": 0,
    "stability": None,
    "difficulty": None,
    "due": NOW.isoformat(),
    "last_review": None,
}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'{"version": 2, "cards": {}}',
        b'{"version": 1, "cards": {"x": {"memory": {}}}}',
        json.dumps({"version": 1, "cards": {"x": {"memory": GOOD | {"due": "soon"}}}}).encode(),
        json.dumps({"version": 1, "cards": {"x": {"memory": GOOD | {"state": 9}}}}).encode(),
        json.dumps({"version": 1, "cards": {"x": {"memory": GOOD, "answered": "often"}}}).encode(),
    ],
)
def test_a_damaged_file_is_set_aside(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in (1, 2):
        (tmp_path / "quiz.json").write_bytes(content)
        Progress(tmp_path).record(FIRST, "good")
        aside = tmp_path / f"quiz.damaged-{n}.json"
        assert aside.read_bytes() == content
        told = capsys.readouterr().err
        assert str(aside) in told
        assert told.count("\n") == 1
        assert list(Progress(tmp_path).read()) == [FIRST]


def test_an_intact_file_is_read_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quiz.json").write_text(json.dumps({"version": 1, "cards": {"gone-from-the-bank": {"memory": GOOD}}}))
    Progress(tmp_path).record(FIRST, "good")
    assert list(Progress(tmp_path).read()) == ["gone-from-the-bank", FIRST]
    assert capsys.readouterr().err == ""


def test_an_interruption_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(tmp_path)
    progress.record(FIRST, "good")
    before = progress.path.read_bytes()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for moment in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, moment, interrupted)
            with pytest.raises(KeyboardInterrupt):
                progress.record(SECOND, "good")
        assert progress.path.read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["quiz.json"], "nothing is left behind"


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, ".local/share/refimpl"),
        ("linux", {"XDG_DATA_HOME": "/xdg"}, "/xdg/refimpl"),
        ("darwin", {}, "Library/Application Support/refimpl"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/refimpl"),
        ("linux", {"REFIMPL_DATA": "/mine", "XDG_DATA_HOME": "/xdg"}, "/mine"),
    ],
)
def test_the_platforms_own_place(
    platform: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REFIMPL_DATA", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    assert userdata.data_folder() == Path.home() / expected
