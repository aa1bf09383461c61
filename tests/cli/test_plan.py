"""`refimpl plan activations`: what it prints, and how it refuses."""

import json
import re
from pathlib import Path

import pytest
from test_main import refimpl_command

from refimpl.activation.budget import Again
from refimpl.cli.plan import bytes_of, words
from refimpl.plan.published import PUBLIC_MIXTURES

HALF = {"device": "cpu", "ratio": 0.5}
SMALL = ["--layers", "5", "--width", "64", "--heads", "2", "--context", "16", "--batch", "2"]


def test_activations(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert refimpl_command(monkeypatch, "plan", "activations", "--budget", "300kB", *SMALL, "--count") == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^(keep all|every block|sqrt|best).*?([\d.]+) +([\d.]+) +([\d.]+)x$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["keep all", "every block", "sqrt", "best"]
    assert all(predicted == counted for _, predicted, counted, _ in rows)
    peaks = {name: float(predicted) for name, predicted, _, _ in rows}
    assert peaks["best"] <= 0.3 < peaks["keep all"]
    assert float(rows[0][3]) == 1 < float(rows[3][3])
    assert "again(" in printed.splitlines()[-2]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--budget", "lots"], "--budget lots: a number of bytes, such as 2GB, 500MB or 1.5GiB"),
        (["--budget", "-1"], "--budget -1: a number of bytes, such as"),
        (["--budget", "1GB", "--batch", "100000000"], "a block does not fit into memory: lower --width, --context or"),
        (["--budget", "1kB"], "no plan fits into 1000 bytes; the least that does needs about "),
        (["--budget", "1GB", "--heads", "3"], "width 64 does not divide into 3 heads"),
    ],
)
def test_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert refimpl_command(monkeypatch, "plan", "activations", *SMALL, *arguments) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--peak", "--efficiency"])
@pytest.mark.parametrize("number", ["inf", "nan"])
def test_numbers_that_are_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, number: str
) -> None:
    assert refimpl_command(monkeypatch, "plan", "--params", "7B", option, number) == 2
    assert re.fullmatch(f"refimpl plan: .*'{option}'.*\n", capsys.readouterr().err)


def test_layouts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert refimpl_command(monkeypatch, "plan", "--params", "7B", "--gpus", "64", "--top", "3") == 0
    printed = capsys.readouterr().out
    assert "layouts fit; the fastest" in printed
    assert len(re.findall(r"^│ +\d+ │", printed, re.MULTILINE)) == 3
    assert refimpl_command(monkeypatch, "plan", "--params", "1T", "--gpus", "8") == 0
    assert "nothing fits" in capsys.readouterr().out


def test_layouts_of_a_mixture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, config = tmp_path / "config.json", tmp_path / "ds.json"
    model.write_text(json.dumps(PUBLIC_MIXTURES["Mixtral 8x7B"][0]))
    command = ("plan", "--model", str(model), "--gpus", "64")
    assert refimpl_command(monkeypatch, *command) == 0
    printed = capsys.readouterr().out
    assert "46.7 billion parameters, of which a token meets 12.9" in printed
    assert "ep GB sent" in printed
    config.write_text(json.dumps({"expert_parallel": {"enabled": True, "autoep_size": 16}, "train_batch_size": 64}))
    assert refimpl_command(monkeypatch, *command, "--config", str(config)) == 2
    assert "8 experts over ep 16 of 64 data ranks" in capsys.readouterr().err


def test_the_layout_of_a_deepspeed_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 16, "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 8}, "pipeline": {"stages": 4}, "bf16": {"enabled": True},
    }  # fmt: skip
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(asked))
    command = ("plan", "--params", "70B", "--config", str(file))
    assert refimpl_command(monkeypatch, *command, "--gpus", "512") == 0
    rows = re.findall(
        r"^│ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │", capsys.readouterr().out, re.MULTILINE
    )
    assert (
        rows == [("16", "4", "1", "8", "2", "16")] * 2
    )  # dp, pp, cp, tp, micro-batch, micro-batches: with and without recompute
    assert refimpl_command(monkeypatch, *command, "--gpus", "48") == 2
    assert "pp 4 x cp 1 x tp 8 do not divide 48 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give either --params 7B or --model config.json"),
        (["--params", "many"], "--params many: a number of parameters, such as 125M, 7B or 1T"),
        (["--params", "7B", "--gpu-memory", "big"], "--gpu-memory big: a number of bytes"),
        (["--model", "nowhere.json"], "--model nowhere.json: No such file"),
        (["--model", __file__], "a transformers configuration is JSON: "),
        (["--params", "1e30"], "a number of parameters, such as 125M, 7B or 1T, at most 100T"),
        (["--params", "1e3"], "--params 1e3: the smallest GPT here has 7M"),
        (["--params", "7B", "--network", "0GB"], "--network, --memory-bandwidth: 1MB or more"),
        (["--params", "7B", "--gpu-memory", "80"], "80GB, not 80"),
        (["--params", "7B", "--gpus", "37", "--batch", "5"], "no layout divides them all; change the batch"),
    ],
)
def test_layouts_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert refimpl_command(monkeypatch, "plan", *arguments) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_a_model_that_is_no_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for text, reason in (("[1]", "is a JSON object, not list"), ("[" * 100_000, "is JSON: maximum recursion depth")):
        (tmp_path / "config.json").write_text(text)
        assert refimpl_command(monkeypatch, "plan", "--model", str(tmp_path / "config.json")) == 2
        assert f"a transformers configuration {reason}" in capsys.readouterr().err


def test_a_configuration_of_another_batch_or_of_32_bits_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    command = ("plan", "--params", "7B", "--config", str(file), "--batch")
    for half in (False, True):
        file.write_text(json.dumps({"train_batch_size": 8, "bf16": {"enabled": half}}))
        assert refimpl_command(monkeypatch, *command, "8") == 0
        assert ("is for 32 bits" in capsys.readouterr().out) != half
    assert refimpl_command(monkeypatch, *command, "64") == 2
    assert "has 8: leave one of them out" in capsys.readouterr().err


def test_what_is_offloaded_is_not_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, state = tmp_path / "ds.json", []
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}}):
        both = {"offload_optimizer": {"device": "cpu"}} | zero if zero else {}
        file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 3} | both}))
        assert refimpl_command(monkeypatch, "plan", "--params", "7B", "--config", str(file)) == 0
        printed = capsys.readouterr().out
        state.append(float(re.findall(r"│ +no │ +([\d.]+) │", printed)[0]))
        assert ("offloaded: " in printed) == bool(zero)
    assert "offloaded: parameters, gradients, optimizer, master weights; the time" in printed
    fp32 = 6.66  # billion parameters; 16 bytes each over 8 GPUs, 4 of them without optimizer state and gradients
    assert state[0] - state[1] == pytest.approx(fp32 * 12 / 8, rel=0.02)
    assert state[1] - state[2] == pytest.approx(fp32 * 4 / 8, rel=0.05)
    file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"offload_optimizer": HALF}}))
    assert refimpl_command(monkeypatch, "plan", "--params", "7B", "--config", str(file)) == 2
    assert "offload_optimizer.ratio below 1: the planner knows all or nothing" in capsys.readouterr().err


def test_what_a_configuration_has_and_no_formula_counts_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, words = tmp_path / "ds.json", "what these figures leave out: "
    for more, said in (
        ({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}, ""),
        ({"optimizer": {"type": "Lion"}, "data_types": {"grad_accum_dtype": "fp32"}},
         "optimizer.type Lion (counted as AdamW), data_types.grad_accum_dtype\n"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": True}},
         "zero_hpz_partition_size, zero_quantized_weights\n"),
    ):  # fmt: skip
        file.write_text(json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}} | more))
        assert refimpl_command(monkeypatch, "plan", "--params", "1B", "--config", str(file)) == 0
        assert capsys.readouterr().out.partition(words)[2] == said
    file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}))
    assert refimpl_command(monkeypatch, "plan", "--params", "1B", "--config", str(file)) == 2
    assert "mics_shard_size 2: the planner divides state over all data ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8), ("77", 77), ("3k", 3000), ("2TB", 2 * 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


def test_a_size_without_end_is_no_size() -> None:
    with pytest.raises(ValueError, match=r"--budget 9+: a number of bytes"):
        bytes_of("9" * 5000)


def test_words() -> None:
    assert words((0, 1, 2, Again((3, Again((4, 5)))), 6)) == "0-2 · again(3 · again(4-5)) · 6"
