"""Ranks that others started, as real processes: whatever the launcher says, they find each other or say what to do."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import worlds

from refimpl import launch
from refimpl.engine.assemble import connect
from refimpl.ranks.cards import has_own_gpu, refuse_shared
from refimpl.ranks.environment import LAUNCHERS, Place

ROOT = Path(__file__).parents[1]
STARTS = ("MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "REFIMPL_")
PLACES = {name for row in LAUNCHERS for name in (row.rank, row.size, row.local_rank, row.local_size)}
ALONE = {k: v for k, v in os.environ.items() if not k.startswith(STARTS) and k not in PLACES}
BASE = {
    **ALONE,
    "GLOO_SOCKET_IFNAME": worlds.LOOPBACK,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
}

HEAD = "import os, sys, torch, torch.distributed as dist, refimpl\nfrom refimpl import Group\n"
SUM = HEAD + """
refimpl.join("cpu", timeout=60)
refimpl.join()
group = Group.world()
x = torch.tensor([group.rank + 1])
group.all_reduce(x)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print(x.item(), *(os.environ[name] for name in names))
"""  # fmt: skip


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def forked(source: str, environ: Callable[[int], Mapping[str, str]]) -> list[tuple[int, str]]:
    """As `ranks`, in two processes that have torch already, which is 4 of the 5 s of CPU time; they do not exit."""
    environs = [{**BASE, **environ(rank)} for rank in range(2)]

    def work() -> tuple[int, str]:
        rank = dist.get_rank()
        dist.destroy_process_group()  # alone again
        os.environ.clear()
        os.environ.update(environs[rank])
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            try:
                exec(source, {"__name__": "__main__"})
            except Exception:
                traceback.print_exc()
                return 1, said.getvalue()
        if dist.is_initialized():
            dist.destroy_process_group()  # which a process that exits does by itself
        return 0, said.getvalue()

    return launch.run(work, device="cpu", timeout=120)


def ranks(tmp_path: Path, source: str, environ: Callable[[int], Mapping[str, str]]) -> list[tuple[int, str]]:
    """Two processes with environments of their own: (exit status, output) of each."""
    script = tmp_path / "script.py"
    script.write_text(source)
    started = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**BASE, **environ(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
        return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip


def old_srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank),
        "SLURM_TASKS_PER_NODE": "2", "WORLD_SIZE": "2",
    }  # fmt: skip


def open_mpi(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }  # fmt: skip


def hydra(rank: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}


def test_ranks_of_another_launcher_join_and_leave(tmp_path: Path) -> None:
    assert ranks(tmp_path, SUM, srun) == [(0, f"3 {rank} 2 {rank} 2\n") for rank in range(2)]


@pytest.mark.parametrize("environ", [old_srun, open_mpi, hydra])
def test_ranks_of_other_launchers_join(environ: Callable[[int], dict[str, str]]) -> None:
    for rank, (status, output) in enumerate(forked(SUM, environ)):
        assert (status, output) == (0, f"3 {rank} 2 {rank} 2\n"), output


@pytest.mark.parametrize("more", [{}, {"LOCAL_RANK": "{}"}])
def test_ranks_set_by_hand_find_out_who_shares_their_machine(more: dict[str, str]) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}

    def by_hand(rank: int) -> dict[str, str]:
        return {"RANK": str(rank), **place, **{k: v.format(rank) for k, v in more.items()}}

    for rank, (status, output) in enumerate(forked(SUM, by_hand)):
        assert (status, output) == (0, f"3 {rank} 2 {rank} 2\n"), output


def test_a_place_and_a_meeting_point_can_be_given() -> None:
    port = free_port()
    given = f'"cpu", init_method="tcp://127.0.0.1:{port}", rank=int(os.environ["MINE"]), world_size=2, timeout=60'
    source = SUM.replace('"cpu", timeout=60', given)
    for rank, (status, output) in enumerate(forked(source, lambda rank: {"MINE": str(rank)})):
        assert (status, output) == (0, f"3 {rank} 2 {rank} 2\n"), output


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_nccl_without_gpus_becomes_gloo_and_rank_0_says_so_once() -> None:
    source = SUM.replace('"cpu", timeout=60', 'backend="nccl"')
    (zero, said), (one, nothing) = forked(source, open_mpi)
    assert (zero, one) == (0, 0), (said, nothing)
    assert said.count("backend='nccl' needs a GPU for each of the 2 ranks") == 1
    assert "nccl" not in nothing


@pytest.mark.parametrize(
    ("visible", "own"),
    [
        (("A", "B"), True),
        (("A", "A"), False),
        (("A", "a"), False),
        (("A", "AB"), False),
        (("AB", "AB"), False),
        (("", ""), False),
    ],
)
def test_ranks_that_see_one_gpu_each_have_it_for_themselves(
    visible: tuple[str, str], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `srun --gpus-per-task=1` has it; else they would find one GPU for all of them, and train on the CPU.

    "a" is another slice of the card that "A" is one of: NCCL has no use for two of them.
    """
    store, mine = dist.HashStore(), threading.local()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(mine.gpus))

    def properties(i: int) -> SimpleNamespace:
        bus = ord(mine.gpus[i].upper())
        return SimpleNamespace(uuid=mine.gpus[i], pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def ask(rank: int) -> bool:
        mine.gpus = visible[rank]
        return has_own_gpu(Place("srun", rank, 2, rank, 2, ""), store, 2)

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(ask, range(2))) == [own, own]


@pytest.mark.parametrize(
    ("cards", "told"),
    [
        (("A", "B", "C"), None),
        (("", "", ""), None),
        (("A", "B", "A"), r"ranks \[0, 2\] have one GPU, .*0:65:0 of .*CUDA_VISIBLE_DEVICES"),
        (("A", "a", "B"), r"ranks \[0, 1\] have one GPU"),
        (("A", "", "B"), r"ranks \[1\] have not a GPU each"),
    ],
)
def test_two_ranks_of_one_card_are_told_before_nccl_is(
    cards: tuple[str, ...], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two agents of torchrun on one machine have it, each of which deals out all GPUs. "a" is a slice of "A"."""
    store = dist.HashStore()
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda i: SimpleNamespace(pci_domain_id=0, pci_bus_id=ord(cards[i].upper()), pci_device_id=0),
    )

    def ask(rank: int) -> None:
        device, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl" if cards[rank] else "gloo"
        with pytest.raises(RuntimeError, match=told) if told else nullcontext():
            refuse_shared(Place("torchrun", rank, 3, 0, 1, ""), store, backend, device)

    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(ask, range(3)))


def test_a_process_that_is_alone_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIMPL_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert connect().device == torch.device("cpu")
    assert current == []
    monkeypatch.delenv("REFIMPL_DEVICE")
    assert connect().device == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")], 'what a script makes on "cuda" is there'


def test_a_forgotten_join_is_an_error_on_every_rank() -> None:
    source = HEAD + "Group.world()\nprint('trained alone')\n"
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for environ in (srun, open_mpi, lambda rank: {"RANK": str(rank), **place}):
        for rank, (status, output) in enumerate(forked(source, environ)):
            assert status == 1
            assert f"rank {rank} of 2, which" in output
            assert "has not joined the others, and would train alone: call refimpl.join()" in output


def test_initialize_joins_the_ranks_of_any_launcher() -> None:
    source = HEAD + "from refimpl.engine.assemble import connect\nprint(connect().size, connect().size)\n"
    assert forked(source, srun) == [(0, "2 2\n")] * 2


def test_ranks_of_several_machines_are_told_what_to_export() -> None:
    def two_nodes(rank: int) -> dict[str, str]:
        return srun(rank) | {"SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}

    for rank, (status, output) in enumerate(forked(SUM, two_nodes)):
        assert status == 1
        assert f"rank {rank}: srun started 2 ranks, 1 of them on this machine, and did not say where" in output
        assert "export MASTER_ADDR (the name of the host of rank 0) and MASTER_PORT" in output


def test_join_and_connect_inside_run_change_nothing() -> None:
    def work() -> tuple[int, int, bool]:
        before = dist.group.WORLD
        launch.join()
        return dist.get_world_size(), connect().size, dist.group.WORLD is before

    assert launch.run(work) == [(2, 2, True)] * 2


def test_a_rank_that_its_job_has_not_is_refused_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in by_hand.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, for 2 ranks, not 2"):
        launch.join("cpu", timeout=1)


def test_a_local_rank_that_its_machine_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in (by_hand | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"local rank 1 of 1 on this machine.*LOCAL_WORLD_SIZE are set by hand"):
        launch.join("cpu", timeout=10)


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 2), (2, 2), (-1, 2)])
def test_half_a_place_or_one_outside_is_refused(rank: int | None, world_size: int | None) -> None:
    with pytest.raises(ValueError, match="rank"):
        launch.join(rank=rank, world_size=world_size, init_method="tcp://127.0.0.1:1")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be 'nccl' or 'gloo', not 'mpi'"):
        launch.join(backend="mpi")
