"""`refimpl deepspeed --autotuning tune|run`: try a script's configurations, show each as it ends, keep the best."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console

from refimpl.bench.autotune import Candidate, Metrics, Search
from refimpl.bench.trials import Script, Trials, summary
from refimpl.ranks.launcher import torchrun

WAYS = ("tune", "run")


def run(asked: argparse.Namespace, words: Sequence[str]) -> NoReturn:
    """Become the script with the best configuration, for "run"; else end. Exit status 1 if every trial failed.

    words: the whole command line. ValueError, or ConfigError, for what cannot be tried.
    """
    if asked.autotuning not in WAYS:
        raise ValueError(f"--autotuning {asked.autotuning}: write {' or '.join(WAYS)}")
    command, _ = torchrun(asked)
    ranks, nodes = int(command[1]), int(command[3])
    if nodes > 1:
        raise ValueError("--autotuning: on one machine: trials start and end there")
    before = without(words[: len(words) - len(asked.user_args)], "--autotuning")
    trials, console = Trials(Script.of(before, asked.user_args), ranks), Console(stderr=True)

    def measure(candidate: Candidate) -> Metrics | None:
        with console.status(f"{candidate.name} ..."):
            found = trials.measure(candidate)
        if found is None:
            said = trials.why(candidate)
        else:
            said = f"{found['throughput']:.1f} samples a second, {found['latency']:.1f} ms a step"
        console.print(f"{candidate.name}: {said}", highlight=False, soft_wrap=True)
        return found

    search = Search(trials.asked, measure)
    with ended_as_by_ctrl_c():
        best = search.run(trials.space)
    if best is None:
        print("refimpl deepspeed: every trial failed; their stderr.log say why", file=sys.stderr)
        sys.exit(1)
    chosen = trials.settle(search, best)
    console.print(summary(search), highlight=False, soft_wrap=True)
    console.print(f"{best.name} is best: {trials.folder / 'ds_config_optimal.json'}", highlight=False, soft_wrap=True)
    if asked.autotuning == "run":
        os.execv(chosen[0], chosen)
    sys.exit(0)


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, of a scheduler, and SIGHUP, of a terminal that closes, are KeyboardInterrupt: a trial is ended too."""
    before = {end: signal.signal(end, signal.default_int_handler) for end in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


def without(words: Sequence[str], option: str) -> list[str]:
    """`words` without an option and its value."""
    at = next(at for at, word in enumerate(words) if word.partition("=")[0] == option)
    return [*words[:at], *words[at + (1 if "=" in words[at] else 2) :]]
