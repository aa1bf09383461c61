"""Autotuning: what is tried and when it ends, what each trial is told, and a script that is really tried."""

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from test_join import free_port
from torch import nn
from typer.testing import CliRunner

import refimpl
from refimpl.bench import trials
from refimpl.bench.autotune import Candidate, Metrics, Search, Space
from refimpl.bench.trials import Script, Trials, given, replaced, summary
from refimpl.cli.autotune import ended_as_by_ctrl_c, without
from refimpl.cli.main import app
from refimpl.engine.autotuning import Autotuning
from refimpl.engine.config import load_config
from refimpl.engine.configuration.batch import STEPS
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning

SCRIPT = """
import sys, torch, refimpl
from torch import nn
at = sys.argv.index("--deepspeed_config") + 1
engine, *_ = refimpl.initialize(model=nn.Linear(4, 4), config=sys.argv[at])
for _ in range(9):
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).sum())
        engine.step()
print("never reached")
"""
FILE: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": [2],
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": [0, 1], "reduce_bucket_size": 1000},
    "autotuning": {"enabled": True, "start_profile_step": 1, "end_profile_step": 3},
}


FROM_9 = {"min_train_micro_batch_size_per_gpu": 9, "max_train_batch_size": 99}


def asked(**keys: Any) -> Autotuning:
    return Autotuning.model_validate({"enabled": True, **keys})


@pytest.mark.parametrize(
    ("raw", "keys", "right"),
    [
        ({}, {"max_train_micro_batch_size_per_gpu": 8}, ([None], [1, 2, 4, 8], 1)),
        ({"zero_optimization": "all"}, {"max_train_micro_batch_size_per_gpu": 1}, ([0, 1, 2, 3], [1], 1)),
        ({"zero_optimization": {"reduce_bucket_size": 9}}, {"max_train_batch_size": 4}, ([0, 1, 2, 3], [1, 2], 1)),
        ({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": [8, 3]}, {}, ([2], [3, 8], 1)),
        (
            {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
            {"max_train_batch_size": 100},
            ([None], [4, 8, 16], 3),
        ),
        (
            {"gradient_accumulation_steps": 5},
            FROM_9,
            ([None], [9], 5),
        ),
    ],
)
def test_what_the_file_allows_is_tried(raw: dict[str, Any], keys: dict[str, int], right: tuple[Any, ...]) -> None:
    said = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    space = Space.of(raw, asked(**keys), 2, said if "auto" in raw.values() else {})
    assert (space.stages, space.sizes, space.steps) == right


def test_ranks_that_share_a_model_count_once_in_the_largest_batch(tmp_path: Path) -> None:
    file = {**FILE, "train_micro_batch_size_per_gpu": "auto", "tensor_parallel": {"autotp_size": 2}}
    file["autotuning"] = {"enabled": True, "max_train_batch_size": 8}  # of 2 micro-batches on one of two ranks
    (tmp_path / "ds.json").write_text(json.dumps(file))
    assert Trials(Script.of(["t.py"], ["--deepspeed", str(tmp_path / "ds.json")]), 2).space.sizes == [1, 2, 4]


def test_nothing_to_try_is_an_error() -> None:
    raw = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match=r"no micro-batch from 4 up .* 2 micro-batches on each of 8 ranks"):
        Space.of(raw, asked(max_train_batch_size=63), 8, {})
    for section, said in (
        ({"gradient_accumulation_steps": [1, 2]}, r"gradient_accumulation_steps = \[1, 2\]: must be a whole number"),
        ({"train_micro_batch_size_per_gpu": []}, r"train_micro_batch_size_per_gpu = \[\]: must be a whole number"),
        ({"train_micro_batch_size_per_gpu": [2, "a"]}, "train_micro_batch_size_per_gpu = 'a': must be a whole number"),
        ({"zero_optimization": {"stage": [1, "all"]}}, r"stage = \[1, 'all'\]: 0, 1, 2 or 3, a list of these, or"),
        ({"zero_optimization": {"stage": []}}, r"stage = \[\]: 0, 1, 2 or 3"),
        ({"zero_optimization": {"reduce_bucket_size": [1, 2]}}, r"reduce_bucket_size = \[1, 2\]: no list is tried but"),
    ):
        with pytest.raises(ConfigError, match=said):
            Space.of(section, asked(), 1, {})


def search(speeds: dict[tuple[int | None, int], float], keys: dict[str, Any], stages: list[int | None]) -> Search:
    """Those who are not in `speeds` fail."""

    def measure(candidate: Candidate) -> Metrics | None:
        speed = speeds.get((candidate.stage, candidate.micro))
        return None if speed is None else {"throughput": speed, "latency": 1e3 * candidate.micro / speed}

    found = Search(asked(**keys), measure)
    found.run(Space(stages, [1, 2, 4, 8], 1))
    return found


def test_micro_batches_double_while_that_pays_and_stages_rise_while_they_do() -> None:
    speeds = {(0, 1): 10.0, (0, 2): 14.0, (0, 4): 13.0}
    speeds |= {(1, 1): 9.0, (1, 2): 15.0, (1, 4): 16.0, (2, 1): 11.0, (2, 2): 9.0}
    found = search(speeds, {}, [0, 1, 2, 3])
    tried = [(candidate.stage, candidate.micro) for candidate, _ in found.tried]
    assert tried == [(0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2)]
    assert found.best == Candidate(1, 4, 1)
    assert summary(found).splitlines()[-1] == "| global | 9 | 16.0 | z1_tmbspg4_gas1 |"
    assert summary(found).splitlines()[4] == "| z2 | 2 | 11.0 | z2_tmbspg1_gas1 |"
    fast = search(speeds, {"metric": "latency"}, [0, 1])
    assert fast.best == Candidate(0, 1, 1)  # 100 ms, and 111
    assert summary(fast).splitlines()[-1] == "| global | 4 | 100.0 | z0_tmbspg1_gas1 |"


def test_where_the_scripts_own_micro_batch_is_too_large_its_halves_are_tried() -> None:
    space = Space.of({"train_micro_batch_size_per_gpu": "auto"}, asked(), 1, {"train_micro_batch_size_per_gpu": 12})
    assert (space.sizes[:2], space.smaller) == ([12, 24], (6, 3, 1))
    assert Space.of({"train_micro_batch_size_per_gpu": [4, 8]}, asked(), 1, {}).smaller == ()
    found = Search(asked(), lambda c: {"throughput": c.micro, "latency": 1.0} if c.micro <= 3 else None)
    assert found.run(space) == Candidate(None, 3, 1)
    assert [candidate.micro for candidate, _ in found.tried] == [12, 6, 3]


def test_a_search_ends() -> None:
    speeds = {(stage, micro): 1.0 + micro for stage in range(4) for micro in (1, 2, 4, 8)}
    assert len(search(speeds, {"tuner_num_trials": 3}, [0, 1]).tried) == 3
    assert len(search(speeds, {"tuner_early_stopping": 2}, [0, 1, 2]).tried) == 6
    nothing = search({}, {}, [0, 1])
    assert nothing.best is None
    assert "| z0 | 1 | none | every trial failed |" in summary(nothing)


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("--lr 1 --deepspeed_config a.json", "a.json"),
        ("--deepspeed --deepspeed_config a.json --x", "a.json"),
        ("--deepspeed a.json", "a.json"),
        ("--deepspeed=a.json --x 1", "a.json"),
    ],
)
def test_the_configuration_of_a_script_is_found_and_replaced(words: str, config: str) -> None:
    script = Script.of(["--num_gpus", "2", "train.py"], words.split())
    assert script.config == config
    command = script.command(Path("b.json"), {"--bs": 3})
    its = words.replace("a.json", "b.json").split()
    assert command[2:] == ["refimpl", "deepspeed", "--num_gpus", "2", "train.py", *its, "--bs", "3"]


def test_options_of_a_command_line() -> None:
    words = ["a", "--bs", "4", "--gas=2"]
    assert (given(words, "--bs"), given(words, "--gas"), given(words, "--x")) == (4, 2, None)
    assert replaced(words, "--bs", "8") == ["a", "--bs", "8", "--gas=2"]
    assert replaced(words, "--gas", "8") == ["a", "--bs", "4", "--gas=8"]
    assert without(["--autotuning", "run", "train.py"], "--autotuning") == ["train.py"]
    assert without(["-x", "2", "--autotuning=run", "train.py"], "--autotuning") == ["-x", "2", "train.py"]


def test_an_engine_on_trial_writes_its_time_and_ends(tmp_path: Path) -> None:
    config = {**FILE, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {}}
    config["autotuning"] = {**FILE["autotuning"], "metric_path": str(tmp_path / "metrics.json")}
    engine, *_ = refimpl.initialize(model=nn.Linear(4, 4), config=config)
    for _ in range(5):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.backward(engine(torch.ones(2, 4)).sum())
    with pytest.raises(SystemExit, match="0"):
        engine.step()
    assert engine.global_steps == 3
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["throughput"] * found["latency"] / 1e3 == pytest.approx(4)  # samples a step
    del config["autotuning"]["metric_path"]
    with pytest.warns(ConfigWarning, match=r"autotuning\.enabled: without effect, unless started by"):
        refimpl.initialize(model=nn.Linear(4, 4), config=config)


def test_a_script_is_tried_and_the_best_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    real = trials.to_its_end

    def run(command: list[str], out: IO[str], error: IO[str]) -> int:
        """Trials of stage 1 fail, and cost no ranks."""
        if "z1_tmbspg2" not in command[-1]:
            return real(command, out, error)
        error.write("[rank0]: Traceback:\n[rank0]: MemoryError: too large\nE1129 torch ChildFailedError:\n")
        return 1

    monkeypatch.setattr(trials, "to_its_end", run)
    line = f"deepspeed --autotuning tune --num_gpus 1 --master_port {free_port()} train.py --deepspeed_config ds.json"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    folder = tmp_path / "autotuning_results"
    good, bad = folder / "z0_tmbspg2_gas2", folder / "z1_tmbspg2_gas2"
    assert (good / "stdout.log").read_text() == ""
    assert json.loads((good / "metrics.json").read_text())["throughput"] > 0
    assert "z1_tmbspg2_gas2: failed: MemoryError: too large (autotuning_results/z1_tmbspg2_gas2/std" in result.output
    assert not (bad / "metrics.json").exists()
    best = json.loads((folder / "ds_config_optimal.json").read_text())
    assert best == {
        "gradient_accumulation_steps": 2,
        "optimizer": FILE["optimizer"],
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 1000},
    }
    assert shlex.split((folder / "cmd_optimal.txt").read_text())[-1] == str(folder / "ds_config_optimal.json")
    assert "global | 2 |" in (folder / "summary.txt").read_text()
    monkeypatch.setattr(trials, "to_its_end", lambda *_: 0)
    before, candidate = line.split()[3:-2], Candidate(0, 2, 2)
    again = Trials(Script.of(before, line.split()[-2:]), 1)  # what has a result is not tried again
    assert again.measure(candidate) == json.loads((good / "metrics.json").read_text())
    other = Trials(Script.of(["--num_gpus", "2", "train.py"], line.split()[-2:]), 2)  # but this is another's
    assert other.measure(candidate) is None
    assert "failed: the script ended before step 3, end_profile_step" in other.why(candidate)
    (bad / "stderr.log").write_text("  traceback : Signal 9 (SIGKILL) received by PID 77\n")
    assert "failed: Signal 9 (SIGKILL) (" in other.why(Candidate(1, 2, 2))


def test_a_trial_ends_with_the_search(tmp_path: Path) -> None:
    """Told to end by SIGTERM: itself, here by the trial, as by Ctrl-C; the trial, as torchrun is to end its ranks."""
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = [*map(signal.getsignal, ends)]
    with ended_as_by_ctrl_c():
        assert [*map(signal.getsignal, ends)] == [signal.default_int_handler] * 2
        code = "import os, signal, sys; signal.signal(15, lambda *_: sys.exit(print('ended'))); "
        code += "os.kill(os.getppid(), 15); signal.pause()"  # not 2, which what a shell starts with `&` ignores
        with (tmp_path / "out").open("w") as out, pytest.raises(KeyboardInterrupt):
            trials.to_its_end([sys.executable, "-c", code], out, out)
    assert (tmp_path / "out").read_text() == "ended\n"
    assert [*map(signal.getsignal, ends)] == before


@pytest.mark.parametrize(
    ("line", "section", "said"),
    [
        ("--autotuning tune train.py", {}, "name no configuration: give it --deepspeed_config or --deepspeed FILE"),
        ("--autotuning guess train.py --deepspeed ds.json", {}, "--autotuning guess: write tune or run"),
        ("--autotuning tune train.py --deepspeed ds.json", {"enabled": False}, "autotuning.enabled is not true"),
        ("--autotuning tune train.py --deepspeed ds.json", {"fast": False}, "fast = False: stages and micro-batches"),
        ("--autotuning tune train.py --deepspeed ds.json", {"arg_mappings": {"lr": "--lr"}}, "lr is not tried; only"),
        ("--autotuning tune train.py --deepspeed ds.json", {"arg_mappings": {STEPS: "gas"}}, "no option of a script:"),
        ("--autotuning tune train.py --deepspeed ds.json", {"fats": True}, "autotuning.fats: unknown key"),
        ("--autotuning tune train.py --deepspeed ds.json", {}, "optimiser: unknown key; did you mean optimizer?"),
        ("--autotuning tune train.py --deepspeed ds.json", {"end_profile_step": 1}, "no step would be timed"),
    ],
)
def test_what_cannot_be_tried_is_told(
    line: str, section: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = {
        **FILE,
        "autotuning": {**FILE["autotuning"], **section},
        **({"optimiser": {}} if "optimiser" in said else {}),
    }
    (tmp_path / "ds.json").write_text(json.dumps(file))
    result = CliRunner().invoke(app, ["deepspeed", *line.split()])
    assert result.exit_code == 2
    assert said in result.output
    assert not (tmp_path / "autotuning_results").exists()


def test_a_file_with_autotuning_trains_as_ever() -> None:
    plain = {"train_batch_size": 1, "autotuning": {"enabled": True, "tuner_type": "gridsearch"}}
    assert load_config(plain, world_size=1).autotuning.metric_path is None
    with pytest.warns(ConfigWarning, match="mp_size = 2: the ranks that share a sample follow from the file"):
        load_config({**plain, "autotuning": {"enabled": True, "mp_size": 2}}, world_size=1)
