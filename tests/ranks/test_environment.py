"""What launchers leave in the environment, read as a place; what they leave out, asked for by name."""

import os
from urllib.parse import urlparse

import pytest

from refimpl.ranks.environment import (
    Place,
    expect_alone,
    find,
    in_torchruns_words,
    meeting_point,
    several,
    without_place,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "launcher"), [(TORCHRUN, "torchrun"), (OPEN_MPI, "mpirun"), (HYDRA, "mpirun"), (SRUN, "srun")]
)
def test_each_launcher_is_understood(environ: dict[str, str], launcher: str) -> None:
    place = find(environ)
    assert place is not None
    assert (place.launcher, place.rank, place.size, place.local_rank, place.local_size) == (launcher, 3, 4, 1, 2)
    assert several(environ) == 4


def test_mpirun_inside_slurm_is_not_taken_for_srun() -> None:
    """Its daemons were started by srun, one a node, and their ranks inherit what srun said to the daemon."""
    daemon = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "1"}
    for mpi in (OPEN_MPI, HYDRA):
        place = find(daemon | mpi)
        assert place is not None
        assert (place.launcher, place.rank, place.size, place.local_size) == ("mpirun", 3, 4, 2)


@pytest.mark.parametrize(
    ("tasks", "node", "here"), [("2", "0", 2), ("2(x3)", "2", 2), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3)]
)
def test_slurms_tasks_of_each_node_are_counted(tasks: str, node: str, here: int) -> None:
    place = find(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert place is not None
    assert place.local_size == here


def test_a_batch_script_is_not_a_rank_unless_it_asks_to_join() -> None:
    script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert find(script) is None
    assert several(script) == 1
    place = find(script, certain=False)
    assert place is not None
    assert (place.rank, place.size, place.local_size) == (0, 4, None)


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI, HYDRA, SRUN, {"WORLD_SIZE": "4"}])
def test_a_rank_of_several_is_not_alone(environ: dict[str, str]) -> None:
    with pytest.raises(
        RuntimeError, match=r"of 4, which .* has not joined .*call refimpl\.join\(\), or init_distributed"
    ):
        expect_alone(environ)


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, TORCHRUN | {"WORLD_SIZE": "1"}])
def test_a_process_of_its_own_is_alone(environ: dict[str, str]) -> None:
    expect_alone(environ)


@pytest.mark.parametrize(("name", "said"), [("RANK", "two"), ("WORLD_SIZE", "-1"), ("LOCAL_RANK", "1.5")])
def test_what_is_no_number_is_named(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={said}: a number"):
        find(TORCHRUN | {name: said})


def test_ranks_meet_where_they_were_told_else_on_this_machine() -> None:
    everyone = Place("srun", 0, 4, 0, 4, "77")
    assert meeting_point(everyone, {"MASTER_ADDR": "a", "MASTER_PORT": "5"}) == "tcp://a:5"
    assert meeting_point(everyone, {"MASTER_PORT": "5"}) == "tcp://127.0.0.1:5"
    here = meeting_point(everyone, {})
    assert here.startswith("tcp://127.0.0.1:2")
    assert here == meeting_point(Place("srun", 3, 4, 3, 4, "77"), {})
    assert here != meeting_point(Place("srun", 0, 4, 0, 4, "78"), {})


def test_an_address_with_colons_is_a_host_and_no_port() -> None:
    """A pod whose network is IPv6 alone. torch asks for the address bare in MASTER_ADDR, in brackets in a URL."""
    place = Place("torchrun", 0, 1, 0, 1, "77")
    for address in ("::1", "[::1]"):
        meeting = meeting_point(place, {"MASTER_ADDR": address, "MASTER_PORT": "5"})
        assert (urlparse(meeting).hostname, urlparse(meeting).port) == ("::1", 5)
        assert in_torchruns_words(5, OPEN_MPI | {"MASTER_ADDR": address})["MASTER_ADDR"] == "::1"
    assert in_torchruns_words(29500, OPEN_MPI | {"MASTER_ADDR": "fd00::a"})["MASTER_ADDR"] == "fd00::a"


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1"])
def test_a_port_that_is_none_is_named(port: str) -> None:
    with pytest.raises(ValueError, match=f"MASTER_PORT={port}: a port is a number from 1 to 65535"):
        meeting_point(Place("torchrun", 0, 2, 0, 2, ""), {"MASTER_ADDR": "a", "MASTER_PORT": port})


def test_another_launchers_words_become_torchruns() -> None:
    words = in_torchruns_words(29500, OPEN_MPI | {"MASTER_ADDR": "a"})
    assert words == TORCHRUN | {"MASTER_PORT": "29500"}
    assert find(words) == Place("torchrun", 3, 4, 1, 2, f"parent {os.getppid()}")
    assert in_torchruns_words(29500, words | OPEN_MPI) == {}, "torchrun's own store is at its own port"
    alone = in_torchruns_words(5, {})
    assert [alone[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")] == ["0", "1", "127.0.0.1"]
    with pytest.raises(RuntimeError, match="export MASTER_ADDR"):
        in_torchruns_words(29500, OPEN_MPI)


@pytest.mark.parametrize("local_size", [2, None])
def test_ranks_of_several_machines_must_be_told(local_size: int | None) -> None:
    there = Place("srun", 2, 4, 0, local_size, "77")
    with pytest.raises(RuntimeError, match=r"rank 2: srun started 4 ranks.*export MASTER_ADDR .* and MASTER_PORT"):
        meeting_point(there, {})
    with pytest.raises(RuntimeError, match=r"rank 2: MASTER_ADDR is a, but MASTER_PORT is not set: export MASTER_PORT"):
        meeting_point(there, {"MASTER_ADDR": "a"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("hosta,hostb", "hosta"), ("n[1-4]", "n1"), ("gpu[003-005,009],login1", "gpu003"), ("r[2,4]n[07-08]", "r2n07"),
        ("a-1.b,c[1-2]", "a-1.b"), ("x,n[1-2]", "x"),
    ],
)  # fmt: skip
def test_ranks_that_srun_started_on_several_machines_meet_on_the_first(nodes: str, first: str) -> None:
    """The names are those that `scontrol show hostnames` begins with."""
    place = find(SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert place is not None
    assert meeting_point(place, {}).startswith(f"tcp://{first}:2")
    assert meeting_point(place, {"MASTER_ADDR": "b", "MASTER_PORT": "5"}) == "tcp://b:5"


def test_two_steps_of_a_slurm_job_meet_apart() -> None:
    steps = [find(SRUN | {"SLURM_STEP_ID": step, "SLURM_STEP_NODELIST": "a,b"}) for step in "01"]
    assert len({meeting_point(place, {}) for place in steps if place}) == 2


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI, HYDRA, SRUN])
def test_ranks_that_a_rank_starts_do_not_take_its_place_for_theirs(environ: dict[str, str]) -> None:
    kept = without_place(environ | {"MINE": "1", "TORCHELASTIC_RUN_ID": "x"})
    assert find(kept, certain=False) is None
    assert "MINE" in kept
    assert "TORCHELASTIC_RUN_ID" not in kept
