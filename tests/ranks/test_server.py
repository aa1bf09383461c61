"""The server that ranks are forked from: where it cannot be reached, and what a fork of it has from it."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from refimpl.ranks.errors import RankError
from refimpl.ranks.rank import Rank
from refimpl.ranks.server import ENDED, start_server
from refimpl.ranks.world import World

STARTED = "from refimpl.ranks.server import start_server; start_server('string')"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python takes /tmp then")
def test_a_folder_for_temporary_files_whose_name_no_socket_can_have(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 60) / ("b" * 60)
    folder.mkdir(parents=True)
    ended = subprocess.run([sys.executable, "-c", STARTED], env={"TMPDIR": str(folder)}, capture_output=True, text=True)
    assert ended.stderr.strip().splitlines()[-1] == (
        f"RuntimeError: ranks are started through a socket in the folder for temporary files, and {folder} "
        f"({len(str(folder))} characters) is too long for that: set TMPDIR to a folder with a name of at most 70"
    )


def test_a_rank_that_cannot_answer_yet_does_not_end_of_the_question_where_it_stands() -> None:
    start_server()
    starting = multiprocessing.get_context("forkserver").Process(target=signal.raise_signal, args=(signal.SIGUSR1,))
    starting.start()
    starting.join()
    assert starting.exitcode == 0


INTERRUPTED = """
import multiprocessing, signal
from refimpl.ranks.server import PRELOAD, start_server

def say():
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

if __name__ == "__main__":
    PRELOAD.clear()
    start_server("interrupted")
    rank = multiprocessing.get_context("forkserver").Process(target=say)
    rank.start()
    rank.join()
"""


def test_ctrl_c_while_it_imports_is_not_told_by_it_too(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    (tmp_path / "script.py").write_text(INTERRUPTED)
    command, env = (
        [sys.executable, str(tmp_path / "script.py")],
        {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (ended.stdout.strip(), ended.stderr, ended.returncode) == ("True", "", 0)


def test_it_imports_from_where_the_script_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not from its working directory, nor an installed refimpl where the script's own is another."""
    begun = list[str]()

    def begin() -> None:
        command = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
        begun.extend(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", begin)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    start_server()
    ours = [*dict.fromkeys(map(os.path.abspath, sys.path))]
    assert begun[: len(ours)] == ours
    assert (os.environ["PYTHONPATH"], "PYTHONSAFEPATH" in os.environ) == ("elsewhere", False)


KILLED = """
import os, signal
from multiprocessing import forkserver
import refimpl.launch as launch

def step(server):
    import torch.distributed as dist
    dist.barrier()
    if server and dist.get_rank() == 1:
        os.kill(server, signal.SIGKILL)
        signal.pause()
    dist.barrier()
    return os.getpid()

if __name__ == "__main__":
    pids = launch.run(step, None, ranks=2)
    server = forkserver._forkserver._forkserver_pid
    try:
        launch.run(step, server, ranks=2)
    except launch.RankError as error:
        print(error.rank, error)
    print(len(launch.run(step, None, ranks=2)))
"""


def test_a_killed_server_is_named_and_no_rank_and_the_next_run_starts_another(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines() == [f"None {ENDED}", "2"], ended.stderr


def test_a_server_that_ends_before_it_has_forked_a_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "start", mock.Mock(side_effect=EOFError))
    with pytest.raises(RankError, match="server that ranks are forked from has ended"):
        World(2)


def garbage() -> tuple[bool, bool]:
    """In a rank: whether it looks for garbage, and whether among the functions of torch, too."""
    return gc.isenabled(), any(found is torch.ones_like for found in gc.get_objects()) or gc.get_freeze_count() == 0


def test_a_rank_looks_for_garbage_but_not_in_what_the_server_has_loaded() -> None:
    with World(1, device="cpu") as world:
        assert world.call(garbage) == [(True, False)]
