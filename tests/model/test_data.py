"""The text and its batches: the same bytes whoever asks, and one clear line for a text that cannot be used."""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from refimpl.model.data import CORPUS, Batches, TextError, corpus, load_text

TEXT = bytes(range(1, 128)) * 4


def test_the_corpus_is_pythons_language_reference_the_same_on_every_python() -> None:
    text = corpus().decode()
    of_this_python = "\n\n".join(topics[name] for name in sorted(topics))
    if sys.version_info[:3] == (3, 11, 7):
        assert text == of_this_python
    words = set(of_this_python.split())
    assert len(words & set(text.split())) > 0.6 * len(words)  # 3.11.2 to 3.13.0: 0.93 to 0.99; 3.14.10: 0.77
    assert CORPUS.with_name("LICENSE").read_text().startswith(CORPUS.name)


def test_targets_are_the_next_byte_and_come_from_the_text() -> None:
    tokens, targets = Batches(TEXT, context=16, size=8).batch(0, 0)
    assert tokens.shape == targets.shape == (8, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert all(bytes(row.tolist()) in TEXT for row in torch.cat([tokens, targets[:, -1:]], 1))


def test_a_batch_depends_on_seed_step_and_micro_batch_alone() -> None:
    def draw(seed: int, step: int, micro: int) -> torch.Tensor:
        batches = Batches(TEXT, context=16, size=8, seed=seed)
        batches.batch(7, 7)  # what was drawn before does not matter
        return batches.batch(step, micro)[0]

    assert torch.equal(draw(0, 1, 2), draw(0, 1, 2))
    for other in [(1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 2, 1)]:
        assert not torch.equal(draw(0, 1, 2), draw(*other))


def test_the_shortest_text_gives_its_only_window() -> None:
    tokens, targets = Batches(b"abcde", context=4, size=2).batch(0, 0)
    assert bytes(tokens[1].tolist()) == b"abcd"
    assert bytes(targets[1].tolist()) == b"bcde"
    with pytest.raises(TextError, match="4 bytes is too short: a context of 4 needs 5"):
        Batches(b"abcd", context=4, size=2)


def test_every_window_can_be_drawn() -> None:
    tokens, _ = Batches(b"abcdef", context=4, size=200).batch(0, 0)
    assert {bytes(row.tolist()) for row in tokens} == {b"abcd", b"bcde"}


def test_load_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("naïve\n".encode() * 10)
    assert load_text(file, context=16) == file.read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"shortest by one!", "has 16 bytes: a context of 16 needs at least 17"),
        (b"ab\0cd" * 10, "is a binary file: byte 2 is NUL"),
        (b"abc\xff" * 10, "is not UTF-8 text: byte 3 is 0xff"),
    ],
)
def test_a_useless_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(TextError, match=message) as caught:
        load_text(file, context=16)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"cannot read .*missing.txt: No such file"):
        load_text(tmp_path / "missing.txt", context=16)
    with pytest.raises(TextError, match=r"cannot read .*: Is a directory"):
        load_text(tmp_path, context=16)
