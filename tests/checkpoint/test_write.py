"""A rank's files: when the notes have their name, the rank has nothing more to do with the folder."""

import os
from pathlib import Path

import pytest
import torch

from refimpl.checkpoint.folder import notes_file, rank_file
from refimpl.checkpoint.write import write_rank


def test_rank_0_may_take_the_folder_as_soon_as_the_notes_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the background nobody waits for the rank: it opened the folder once more, and called a whole save failed."""
    replace, new, folder = os.replace, tmp_path / "new", tmp_path / "global_step1"

    def at_once(part: Path, path: Path) -> None:
        replace(part, path)
        new.rename(folder)

    new.mkdir()
    monkeypatch.setattr(os, "replace", at_once)
    write_rank(new, {"weight": torch.ones(3)}, {"save": {"rank": 1}})
    assert {path.name for path in folder.iterdir()} == {notes_file(1), rank_file(1)}
