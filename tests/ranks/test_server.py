"""The server that ranks are forked from: where it cannot be reached, and what a fork of it has from it."""

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from refimpl.ranks.server import start_server

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
