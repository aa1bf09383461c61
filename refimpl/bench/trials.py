"""A trial: the user's own script with another configuration, on the same ranks, in a folder of its own.

    autotuning_results/z1_tmbspg4_gas1/   ds_config.json  cmd.txt  stdout.log  stderr.log  metrics.json
    autotuning_results/                   summary.txt  ds_config_optimal.json  cmd_optimal.txt

The folders and files are DeepSpeed's (deepspeed/autotuning/scheduler.py). What has a result there is not tried again,
unless it is that of another command or configuration.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from refimpl.bench.autotune import Candidate, Metrics, Search, Space, best_of
from refimpl.engine.autotuning import Autotuning
from refimpl.engine.configuration.answer import answer, table
from refimpl.engine.configuration.batch import MICRO, STEPS
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.one_section import section_of
from refimpl.engine.configuration.read import raw_config
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.layout import axes_asked

FLAGS = ("--deepspeed_config", "--deepspeed")  # what a script's configuration follows
ERROR = re.compile(r"(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception|Interrupt)\b.*)")
SIGNAL = re.compile(r".*(Signal \d+ \(SIG\w+\)) received by PID")  # torchrun's words: without memory, SIGKILL
MAPPED = (MICRO, STEPS)


@dataclass
class Script:
    """A command line of the launcher, and where in it the configuration stands."""

    before: list[str]  # the launcher's options, up to the script
    arguments: list[str]  # the script's own
    at: int  # the configuration among them
    inline: str = ""  # "--deepspeed=", where that is part of the same word

    @classmethod
    def of(cls, before: Sequence[str], arguments: Sequence[str]) -> "Script":
        """ValueError if the script is given no configuration."""
        for at, word in enumerate(arguments):
            name, equals, value = word.partition("=")
            if name in FLAGS and equals and value:
                return cls([*before], [*arguments], at, f"{name}=")
            if name in FLAGS and not equals and arguments[at + 1 : at + 2] and arguments[at + 1][:1] != "-":
                return cls([*before], [*arguments], at + 1)
        raise ValueError(
            f"--autotuning: the script's arguments name no configuration: give it {' or '.join(FLAGS)} FILE"
        )

    @property
    def config(self) -> str:
        return self.arguments[self.at].removeprefix(self.inline)

    def command(self, config: Path, options: Mapping[str, int]) -> list[str]:
        """The command line with another configuration, and other values of the script's options."""
        words = [*self.arguments]
        words[self.at] = f"{self.inline}{config}"
        for option, value in options.items():
            words = replaced(words, option, str(value))
        return [sys.executable, "-m", "refimpl", "deepspeed", *self.before, *words]


def replaced(words: Sequence[str], option: str, value: str) -> list[str]:
    """`words` in which `option` has this value, also where it was not given."""
    for at, word in enumerate(words):
        if word == option:
            return [*words[: at + 1], value, *words[at + 2 :]]
        if word.startswith(f"{option}="):
            return [*words[:at], f"{option}={value}", *words[at + 1 :]]
    return [*words, option, value]


def given(words: Sequence[str], option: str) -> int | None:
    """The number that `option` has among `words`."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option and (number := value if equals else "".join(words[at + 1 : at + 2])).isdigit():
            return int(number)
    return None


class Trials:
    """The trials of one script; `measure` is what `Search` asks."""

    def __init__(self, script: Script, ranks: int) -> None:
        """ConfigError for what the file's section `autotuning` lacks."""
        self.script, self.raw = script, raw_config(Path(script.config))
        self.asked = section_of(self.raw, "autotuning", Autotuning)
        if not self.asked.enabled:
            raise ConfigError(f"{script.config}: autotuning.enabled is not true: nothing is to be tried")
        self.options = {key.strip(): option for key, option in (self.asked.arg_mappings or {}).items()}
        if unknown := self.options.keys() - set(MAPPED):
            raise ConfigError(f"autotuning.arg_mappings: {unknown.pop()} is not tried; only {' and '.join(MAPPED)}")
        if wrong := [option for option in self.options.values() if option[:1] != "-"]:
            raise ConfigError(f"autotuning.arg_mappings: {wrong[0]!r} is no option of a script: write --{wrong[0]}")
        self.folder = Path(self.asked.results_dir or "autotuning_results")
        said = {key: given(script.arguments, option) for key, option in self.options.items()}
        known = {key: number for key, number in said.items() if number is not None}
        axes = axes_asked(self.raw)
        together = axes["pp"] * axes["cp"] * axes["tp"]  # ranks that share a sample
        self.space = Space.of(self.raw, self.asked, max(1, ranks // together), known)
        first = Candidate(self.space.stages[0], self.space.sizes[0], self.space.steps)
        answer(first.applied(self.raw), table(DeepSpeedConfig))  # a key that would be refused in every trial is, here
        self.status = 0  # of the last trial's end

    def written(self, candidate: Candidate, folder: Path, name: str, metrics: Path | None = None) -> list[str]:
        """Write a candidate's configuration. -> the command line that trains with it."""
        config = candidate.applied(self.raw)
        if metrics is not None:
            config["autotuning"] = {**config["autotuning"], "metric_path": str(metrics.resolve())}
        else:
            del config["autotuning"]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        numbers = dict(zip(MAPPED, (candidate.micro, candidate.steps), strict=True))
        return self.script.command(path.resolve(), {option: numbers[key] for key, option in self.options.items()})

    def measure(self, candidate: Candidate) -> Metrics | None:
        """Run the script. None if it ended without a result: stderr.log says why."""
        folder = self.folder / candidate.name
        metrics, told = folder / "metrics.json", (folder / "ds_config.json", folder / "cmd.txt")
        before = [file.read_text(encoding="utf-8") for file in told if file.is_file()]
        command = self.written(candidate, folder, "ds_config.json", metrics)
        told[1].write_text(shlex.join(command) + "\n", encoding="utf-8")
        same = before == [file.read_text(encoding="utf-8") for file in told]
        if self.asked.overwrite or not same or not metrics.is_file():
            metrics.unlink(missing_ok=True)
            with (folder / "stdout.log").open("w") as out, (folder / "stderr.log").open("w") as error:
                self.status = to_its_end(command, out, error)
        return json.loads(metrics.read_text(encoding="utf-8")) if metrics.is_file() else None

    def why(self, candidate: Candidate) -> str:
        """Of a trial without a result: the last error that a rank named, and where the rest stands."""
        log = self.folder / candidate.name / "stderr.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        named = [found[1] for line in lines if (found := ERROR.match(line)) and "ChildFailed" not in line]
        named = named or [found[1] for line in lines if (found := SIGNAL.match(line))]
        early = f"the script ended before step {self.asked.end_profile_step}, end_profile_step"
        otherwise = "no error is named" if self.status else early
        return f"failed: {named[-1] if named else otherwise} ({log})"

    def settle(self, search: Search, best: Candidate) -> list[str]:
        """Write what was found. -> the command line of the best."""
        command = self.written(best, self.folder, "ds_config_optimal.json")
        (self.folder / "cmd_optimal.txt").write_text(shlex.join(command) + "\n", encoding="utf-8")
        (self.folder / "summary.txt").write_text(summary(search) + "\n", encoding="utf-8")
        return command


def to_its_end(command: Sequence[str], out: IO[str], error: IO[str]) -> int:
    """Run it -> its exit status. Where this process is told to end first, torchrun is, and ends its ranks."""
    process = subprocess.Popen(command, stdout=out, stderr=error, start_new_session=True)  # it hears of Ctrl-C here
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def summary(search: Search) -> str:
    """The best of each stage, and of all."""
    unit = "ms a step" if search.asked.metric == "latency" else "samples a second"
    lines = [f"| stage | trials | best, {unit} | of |", "| --- | --- | --- | --- |"]
    stages = list(dict.fromkeys(candidate.stage for candidate, _ in search.tried))
    for stage, name in [*((s, f"z{s or 0}") for s in stages), (-1, "global")]:
        tried = [(c, v) for c, v in search.tried if stage in (-1, c.stage)]
        best = best_of(tried)
        shown = "none | every trial failed" if best is None else f"{abs(best[1]):.1f} | {best[0].name}"
        lines.append(f"| {name} | {len(tried)} | {shown} |")
    return "\n".join(lines)
