"""The logger `DeepSpeed`, on stdout, and messages from some ranks only. DeepSpeed: deepspeed/utils/logging.py."""

import functools
import logging
import sys
from collections.abc import Sequence
from typing import TextIO

import torch.distributed as dist

LEVELS = {name.lower(): level for name, level in logging.getLevelNamesMapping().items()}


class Stdout(logging.StreamHandler[TextIO]):
    """Writes to what sys.stdout is at that moment: notebooks and tests replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def _make() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = Stdout()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.WARNING)
        made.propagate = False
    return made


logger = _make()


@functools.cache
def warning_once(message: str) -> None:
    """A warning that is given once a process."""
    logger.warning(message)


logger.warning_once = warning_once  # type: ignore[attr-defined]


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks ([-1]: on all); without ranks, or in a process that is alone, everywhere or nowhere.

    As in DeepSpeed: before anything is joined always; afterwards only on the ranks that are named.
    """
    if (line := _said(message, ranks)) is not None:
        logger.log(level, line)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print, whatever the logger's level, where `log_dist` would log."""
    if (line := _said(message, ranks)) is not None:
        print(line, flush=True)


def _said(message: str, ranks: Sequence[int] | None) -> str | None:
    rank = dist.get_rank() if dist.is_initialized() else -1
    here = rank == -1 or (ranks and (ranks[0] == -1 or rank in ranks))
    return f"[Rank {rank}] {message}" if here else None


@functools.cache
def _log_dist_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist`, once a process for each message."""
    _log_dist_once(message, None if ranks is None else tuple(ranks), level)


def set_log_level_from_string(log_level: str, custom_logger: logging.Logger | None = None) -> None:
    """ "debug", "info", "warning", "error" or "critical"."""
    if log_level.lower() not in LEVELS:
        raise ValueError(f"log level {log_level!r}: one of {', '.join(LEVELS)}")
    (custom_logger or logger).setLevel(LEVELS[log_level.lower()])


def should_log_le(max_log_level: str) -> bool:
    """Whether messages of that level would be written."""
    return logger.getEffectiveLevel() <= LEVELS[max_log_level.lower()]
