"""Byte-level text: a corpus that comes with this package, a user's own file, and batches drawn from a seed.

Micro-batch k of step s depends on (seed, s, k) alone. Whoever takes it, one process that takes them all or rank k
that takes one, sees the same bytes.
"""

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CORPUS = Path(__file__).parent / "text" / "language_reference.txt.gz"


class TextError(ValueError):
    """A text that a model cannot learn from; the message says why, in one line."""


def corpus() -> bytes:
    """The Python language reference, 466 KB of English: the texts that `help("topics")` of Python 3.11.7 shows.

    A copy, since every release of Python has another text, on which every loss would be another.
    """
    return gzip.decompress(CORPUS.read_bytes())


def load_text(path: str | Path, context: int) -> bytes:
    """The bytes of a UTF-8 text file that is long enough for one sequence of `context` tokens.

    Raises:
        TextError: the file cannot be read, is empty, is binary, or has fewer than context + 1 bytes.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from error
    if not text:
        raise TextError(f"{path} is empty")
    if b"\0" in text:
        raise TextError(f"{path} is a binary file: byte {text.index(0)} is NUL; give a UTF-8 text file")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text: byte {error.start} is {text[error.start]:#04x}") from error
    if len(text) < context + 1:
        raise TextError(
            f"{path} has {len(text)} bytes: a context of {context} needs at least {context + 1} (each byte's next byte)"
        )
    return text


class Batches:
    """Random windows of a text.

    Args:
        text: at least context + 1 bytes.
        context: T, tokens in a sequence.
        size: B, sequences in a micro-batch.
        seed: chooses the windows.
    """

    def __init__(self, text: bytes, context: int, size: int, seed: int = 0) -> None:
        if len(text) < context + 1:
            raise TextError(f"a text of {len(text)} bytes is too short: a context of {context} needs {context + 1}")
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context, self.size, self.seed = context, size, seed

    def batch(self, step: int, micro: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Micro-batch `micro` of step `step`: tokens [B, T] and targets [B, T], int64, targets one byte later."""
        last = len(self.text) - self.context  # exclusive
        starts = np.random.default_rng((self.seed, step, micro)).integers(last, size=self.size)
        windows = torch.stack([self.text[s : s + self.context + 1] for s in starts]).to(device, torch.int64)
        return windows[:, :-1], windows[:, 1:]
