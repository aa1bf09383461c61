"""`refimpl deepspeed`: DeepSpeed's launcher, its options, and what it says where it does not follow them."""

import json
import socket
from pathlib import Path

import pytest
import torch
from foreign import run_python

from refimpl.deepspeed.launcher.runner import main, parser
from refimpl.ranks.launcher import torchrun

SCRIPT = """
import argparse, deepspeed, torch
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
engine, *_ = deepspeed.initialize(args=args, model=torch.nn.Linear(3, 3))
for _ in range(2):
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
import torch.distributed as dist
assert args.local_rank == dist.get_rank() == engine.local_rank and engine.global_steps == 2
print(f"rank {dist.get_rank()} of {dist.get_world_size()}")
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}


def command(*line: str) -> tuple[list[str], list[int] | None]:
    return torchrun(parser().parse_args([*line, "train.py", "--local_files_only", "--lr", "1"]))


def test_a_script_runs_unchanged_on_so_many_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    logs = tmp_path / "logs"
    launcher = ["-m", "refimpl", "deepspeed", "--num_gpus", "2", "--master_port", str(port)]
    script = [str(tmp_path / "train.py"), "--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")]
    run_python(*launcher, "--enable_each_rank_log", str(logs), *script, CUDA_VISIBLE_DEVICES="")
    printed = sorted(file.read_text().splitlines()[-1] for file in logs.glob("**/stdout.log"))
    assert printed == ["rank 0 of 2", "rank 1 of 2"]


def test_a_module_and_no_local_rank() -> None:
    arguments, _ = torchrun(parser().parse_args(["--module", "--no_local_rank", "pkg.train", "-x"]))
    assert arguments[-6:] == ["-m", "--", "refimpl.as_deepspeed", "-m", "pkg.train", "-x"]


def test_the_scripts_own_arguments_stay_its_own() -> None:
    arguments, gpus = command("--num_gpus", "4")
    assert gpus is None
    assert arguments[:2] == ["--nproc-per-node", "4"]
    assert arguments[-5:] == ["train.py", "--local_rank=${local_rank}", "--local_files_only", "--lr", "1"]


@pytest.mark.parametrize(
    ("line", "count", "left"),
    [
        ("-i localhost:0,2", 4, [0, 2]),
        ("--include localhost", 3, [0, 1, 2]),
        ("-e localhost:1", 3, [0, 2]),
        ("--exclude 127.0.0.1:0,3", 4, [1, 2]),
    ],
)
def test_some_gpus_of_this_machine(line: str, count: int, left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    arguments, gpus = command(*line.split())
    assert gpus == left
    assert arguments[:2] == ["--nproc-per-node", str(len(left))]


def test_each_of_several_machines_is_told_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", int)
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nworker-0 slots=2\n\nworker-1 slots=4  # the second\n")
    arguments, _ = command("-H", str(hosts), "--no_ssh", "--node_rank", "1", "--master_addr", "worker-0")
    told = dict(zip(arguments[:10:2], arguments[1:10:2], strict=True))
    assert told == {
        "--nproc-per-node": "4",
        "--nnodes": "2",
        "--master-port": "29500",
        "--node-rank": "1",
        "--master-addr": "worker-0",
    }
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # of which the file has four used
    assert command("-H", str(hosts), "--no_ssh", "--node_rank", "1", "--master_addr", "worker-0")[0] == arguments
    with pytest.raises(ValueError, match=r"2 machines: none is logged in to.*--no_ssh --num_nodes 2 --node_rank 0"):
        command("-H", str(hosts))
    hosts.write_text("worker-0 slots=4\nworker-0 slots=2\n")
    with pytest.raises(ValueError, match="line 2: 'worker-0 slots=2' is no new `HOST slots=NUMBER`"):
        command("-H", str(hosts))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--num_gpus 0", "--num_gpus must be 1 or more, not 0"),
        ("--num_gpus -2", "--num_gpus must be 1 or more, not -2"),
        ("-i localhost:0 --num_gpus 2", "exclude each other"),
        ("-i localhost:0 -e localhost:1", "exclude each other"),
        ("-i worker-3:0", "--include 'worker-3:0': write this machine's GPUs"),
        ("-i localhost:0,0", "leaves \\[0, 0\\] of 1 GPUs"),
        ("-e localhost:0", "--exclude 'localhost:0' leaves \\[\\] of 1 GPUs"),
        ("-i localhost:x", "write this machine's GPUs"),
        ("--no_python", "--no_python is not offered"),
        ("--elastic_training --min_elastic_nodes 1 --max_elastic_nodes 2", r"--elastic_training .*: torchrun --nnodes"),
        ("--max_elastic_nodes 2", "--max_elastic_nodes is not offered: torchrun --nnodes MIN:MAX"),
    ],
)
def test_what_is_not_offered_is_told(line: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", int)
    with pytest.raises(ValueError, match=says):
        command(*line.split())


def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--num_nodes", "2", "train.py"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("refimpl deepspeed: 2 machines")
    with pytest.raises(SystemExit, match="2"):
        main(["--autotuning", "tune", "train.py"])
    assert capsys.readouterr().err == "refimpl deepspeed: --autotuning is `refimpl deepspeed`'s: start that\n"
    with pytest.raises(SystemExit, match="2"):
        main(["--num_gpus", "2", "nowhere.py"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("refimpl deepspeed: nowhere.py: no such script")
