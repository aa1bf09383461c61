"""DeepSpeed's launcher: `refimpl deepspeed --num_gpus 2 train.py --its arguments` (deepspeed/launcher/runner.py).

torchrun starts the ranks. Each finds refimpl under the name `deepspeed` (see `refimpl.as_deepspeed`) and gets, before
the script's own arguments, `--local_rank=` and its number, for which DeepSpeed's scripts look. Without a number of
ranks there is one for each slot that a host file gives this machine, else for each GPU, or one in all. It logs in to no
other machine: with `--no_ssh` each is told its place.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

HOSTFILE = "/job/hostfile"
_HERE = ("localhost", "127.0.0.1")
_AGENT = "torchrun --nnodes MIN:MAX -m refimpl.as_deepspeed script.py restarts ranks that were lost"
_REFUSED = {
    "no_python": "every rank is a Python program in which `deepspeed` means refimpl",
    "elastic_training": _AGENT,
    "min_elastic_nodes": _AGENT,
    "max_elastic_nodes": _AGENT,
    "force_multi": "no other machine is logged in to",
    "save_pid": "the launcher's pid is this process's",
    "venv_script": "start refimpl from that environment",
}
_WITH_A_VALUE = ("venv_script", "min_elastic_nodes", "max_elastic_nodes")


def parser() -> argparse.ArgumentParser:
    """DeepSpeed's options and defaults."""
    options = argparse.ArgumentParser(
        "refimpl deepspeed",
        usage="refimpl deepspeed [options] script.py [arguments of the script]",
        description="Run a script that was written for DeepSpeed, on several ranks.",
    )
    options.add_argument("-H", "--hostfile", default=HOSTFILE, help="lines such as `worker-0 slots=4`")
    options.add_argument("-i", "--include", default="", help="localhost:0,2: these GPUs")
    options.add_argument("-e", "--exclude", default="", help="localhost:1: all GPUs but this")
    options.add_argument("--num_nodes", type=int, default=-1, help="machines")
    options.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each machine")
    options.add_argument("--master_port", type=int, default=29500)
    options.add_argument("--master_addr", default="", help="with --no_ssh: the machine of rank 0")
    options.add_argument("--node_rank", type=int, default=-1, help="with --no_ssh: this machine's number")
    options.add_argument("--no_ssh", action="store_true", help="started on each machine by itself")
    options.add_argument("--module", action="store_true", help="the script is a module, as in `python -m`")
    options.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    options.add_argument("--enable_each_rank_log", default="None", help="a folder for what each rank prints")
    options.add_argument("--autotuning", default="", help="tune or run: try what the file allows; run the best")
    for name, why in _REFUSED.items():
        taken = {"default": ""} if name in _WITH_A_VALUE else {"action": "store_true"}
        options.add_argument(f"--{name}", help=f"refused: {why}", **taken)  # type: ignore[arg-type]
    for name in ("launcher", "launcher_args", "ssh_port", "log_level", "bind_core_list"):
        options.add_argument(f"--{name}", help="without effect here")
    for name in ("no_ssh_check", "bind_cores_to_rank"):
        options.add_argument(f"--{name}", action="store_true", help="without effect here")
    options.add_argument("-q", "--quiet", action="store_true", help="without effect here")
    options.add_argument("user_script")
    options.add_argument("user_args", nargs=argparse.REMAINDER)
    return options


def torchrun(asked: argparse.Namespace) -> tuple[list[str], list[int] | None]:
    """torchrun's arguments, and the GPUs that ranks may see (None: all). ValueError names the option and the remedy."""
    for name, why in _REFUSED.items():
        if getattr(asked, name):
            raise ValueError(f"--{name} is not offered: {why}")
    if asked.num_gpus == 0 or asked.num_gpus < -1:
        raise ValueError(f"--num_gpus must be 1 or more, not {asked.num_gpus}")
    if not 0 < asked.master_port < 1 << 16:
        raise ValueError(f"--master_port {asked.master_port}: a port is 1 to 65535, and the same on every machine")
    hosts = hostfile(Path(asked.hostfile))
    nodes = asked.num_nodes if asked.num_nodes > 0 else max(1, len(hosts))
    if nodes > 1 and not (asked.no_ssh and asked.node_rank >= 0 and asked.master_addr):
        raise ValueError(
            f"{nodes} machines: none is logged in to. Start this on each of them with --no_ssh --num_nodes {nodes} "
            "--node_rank 0 (1, ...) --master_addr HOST-OF-RANK-0, or use srun or torchrun (see README)"
        )
    if nodes > 1 and asked.node_rank >= nodes:
        raise ValueError(f"--node_rank {asked.node_rank}: {nodes} machines are 0 to {nodes - 1}; all would wait for it")
    own = [*hosts.values()][max(0, asked.node_rank) :][:1]  # what the file says of this machine
    slots = max(own, default=torch.cuda.device_count()) or 1
    gpus = chosen(asked, slots)
    ranks = len(gpus) if gpus else max(0, asked.num_gpus) or slots
    command = ["--nproc-per-node", str(ranks), "--nnodes", str(nodes), "--master-port", str(asked.master_port)]
    if nodes > 1:
        command += ["--node-rank", str(asked.node_rank), "--master-addr", asked.master_addr]
    if asked.enable_each_rank_log != "None":
        command += ["--log-dir", asked.enable_each_rank_log, "--redirects", "3"]
    command += ["-m", "--"]  # behind it Python 3.11 takes no `--logs` of the script's for torchrun's `--logs-specs`
    command += ["refimpl.as_deepspeed", *(["-m"] if asked.module else []), asked.user_script]
    place = [] if asked.no_local_rank else ["--local_rank=${local_rank}"]  # torchrun puts the number in
    return [*command, *place, *asked.user_args], gpus


def hostfile(path: Path) -> dict[str, int]:
    """Slots by host, {} without a file. ValueError names a line that is none, one without slots, or a host twice.

    What follows the slots is passed over, as in DeepSpeed: mpirun's files have max_slots there.
    """
    if not path.is_file():
        return {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--hostfile {path}: cannot be read: {error}") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not (words := line.split("#")[0].strip()):
            continue
        found = re.fullmatch(r"(\S+)\s+slots=([0-9]+)(\s.*)?", words)
        if found is None or found[1] in slots:
            raise ValueError(f"--hostfile {path}, line {number}: {line!r} is no new `HOST slots=NUMBER`")
        slots[found[1]] = int(found[2])
        if not slots[found[1]]:
            raise ValueError(f"--hostfile {path}, line {number}: {line!r} has no slot: leave the line out")
    if not slots:
        raise ValueError(f"--hostfile {path}: names no host: write lines `HOST slots=NUMBER`, or leave the file out")
    return slots


def chosen(asked: argparse.Namespace, count: int) -> list[int] | None:
    """The GPUs of this machine that --include or --exclude leave of `count`, None if neither is given.

    ValueError for other machines, for GPUs that there are not, and if none is left.
    """
    if not (asked.include or asked.exclude):
        return None
    if (asked.include and asked.exclude) or asked.num_gpus > 0 or asked.num_nodes > 0:
        raise ValueError("--include, --exclude, and --num_gpus or --num_nodes exclude each other: give one of them")
    name, given = ("--include", asked.include) if asked.include else ("--exclude", asked.exclude)
    host, _, numbers = given.partition(":")
    if host not in _HERE or "@" in numbers or not all(n.isdecimal() for n in numbers.split(",") if numbers):
        raise ValueError(f"{name} {given!r}: write this machine's GPUs, such as localhost:0,2")
    named = [int(n) for n in numbers.split(",")] if numbers else list(range(count))
    if torch.cuda.device_count() and max(named) >= count:
        raise ValueError(f"{name} {given!r}: there are {count} GPUs to choose from, 0 to {count - 1}")
    left = named if asked.include else [gpu for gpu in range(count) if gpu not in named]
    if not left or len(set(left)) != len(left):
        raise ValueError(f"{name} {given!r} leaves {left} of {count} GPUs: name each once")
    return left


def make_folder(path: Path) -> None:
    """For what each rank prints. ValueError where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--enable_each_rank_log {path}: cannot be a folder: {error.strerror}") from None


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Become torchrun. What is not offered ends with one line and status 2."""
    asked = parser().parse_args(arguments)
    if (asked.include or asked.exclude) and (visible := os.environ.pop("CUDA_VISIBLE_DEVICES", "")):
        print(
            f"refimpl deepspeed: CUDA_VISIBLE_DEVICES={visible} is set aside, as in DeepSpeed: --include and --exclude "
            "number all GPUs of the machine",
            file=sys.stderr,
        )
    try:
        if asked.autotuning:
            raise ValueError("--autotuning is `refimpl deepspeed`'s: start that")
        command, gpus = torchrun(asked)
        if asked.enable_each_rank_log != "None":
            make_folder(Path(asked.enable_each_rank_log))
        if not (asked.module or Path(asked.user_script).exists()):
            raise ValueError(f"{asked.user_script}: no such script (a module is run with --module)")
    except ValueError as reason:
        print(f"refimpl deepspeed: {reason}", file=sys.stderr)
        sys.exit(2)
    if asked.hostfile != HOSTFILE and not Path(asked.hostfile).is_file():
        print(f"refimpl deepspeed: --hostfile {asked.hostfile}: no such file: this machine alone", file=sys.stderr)
    if gpus is not None and torch.cuda.device_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    cores = (os.cpu_count() or 1) // int(command[1])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command])
