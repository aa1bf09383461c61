"""A rank that begins after its caller has ended."""

import os
from multiprocessing import Pipe
from pathlib import Path

import pytest

from refimpl.ranks import rank


def test_a_rank_whose_caller_has_ended_already_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C while the server still imports torch: ranks that it forks later find the folder gone."""
    monkeypatch.setattr(os, "setpgid", lambda *_: None)  # this process stays in its group
    setup = rank.Setup(1, "gloo", ["cpu"], 1, tmp_path / "gone", {}, keep_settings=False)
    (mine, its), (its_life, life) = Pipe(), Pipe(duplex=False)
    life.close()
    with mine, its, its_life:
        rank.Rank(0, setup, its, its_life).run()
        assert not mine.poll()
