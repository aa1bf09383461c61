"""Ranks that stay from cell to cell: what a cell shows, what moves in and out, and how a failure reads."""

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from refimpl.notebook.session import CellError, Ranks, merged, names

LOST = "The ranks were stopped and their variables are lost: the next %%ranks cell starts new ones."


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    session = Ranks()
    session.start(2)
    yield session
    session.stop()


def failure(ranks: Ranks, source: str, only: list[int] | None = None, timeout: float = 60) -> str:
    _, error = ranks.run("\n" + source, "In[7]", only, timeout)
    assert error is not None
    return str(error)


def text(ranks: Ranks, source: str, only: list[int] | None = None, file: str = "In[7]") -> dict[int, str]:
    shown, error = ranks.run("\n" + source, file, only)
    assert error is None, error
    return shown.texts


def test_variables_stay_and_the_last_expression_is_shown(ranks: Ranks):
    assert text(ranks, "x = torch.tensor([rank + 1])") == {}
    assert text(ranks, "group.all_reduce(x)\nprint('sum')\nx") == dict.fromkeys([0, 1], "sum\ntensor([3])")
    assert text(ranks, "print('no newline', end='')\nworld_size") == dict.fromkeys([0, 1], "no newline\n2")
    assert text(ranks, "x;") == {}
    assert text(ranks, "x if rank else None") == {1: "tensor([3])"}
    assert text(ranks, "x", only=[1]) == {1: "tensor([3])"}


def test_functions_and_classes_of_a_cell_find_its_names_later(ranks: Ranks):
    text(ranks, "import inspect\nbase = 10\ndef add(n):\n    return base + n + rank\nclass Pair:\n    pass")
    text(ranks, "base = 20", file="In[8]")
    assert text(ranks, "add(1)", file="In[9]") == {0: "21", 1: "22"}
    assert text(ranks, "print(inspect.getsource(add)[:10])", file="In[10]") == dict.fromkeys([0, 1], "def add(n)\n")
    pair = ranks.pull("Pair()")
    assert type(pair[0]).__name__ == "Pair"


def test_pull_and_push(ranks: Ranks):
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    ranks.push(x=torch.arange(3), double=double)
    assert [value.tolist() for value in ranks.pull("double(x) + rank")] == [[0, 2, 4], [1, 3, 5]]
    assert ranks.pull("torch.ones(2, requires_grad=True) * rank")[1].tolist() == [1, 1]


def test_tables_and_figures_are_collected(ranks: Ranks):
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nimport pandas as pd\npd.DataFrame([rank])"
    shown, error = ranks.run(plot, "In[1]")
    assert error is None
    assert shown.texts == {}
    for bundles in shown.bundles.values():
        assert [list(bundle) for bundle in bundles] == [["text/plain", "text/html"], ["image/png", "text/plain"]]
    assert shown.bundles[0][0] != shown.bundles[1][0]
    assert shown.bundles[0][1] == shown.bundles[1][1]
    assert ranks.run("1;", "In[2]")[0].bundles == {0: [], 1: []}  # the figure was closed


def test_a_rank_that_raises_is_named_with_its_line_alone(ranks: Ranks):
    text(ranks, "def cut(n):\n    raise ValueError(f'shard {n} is empty')")
    source = "print('begun')\nif rank == 1:\n    cut(3)\ngroup.all_reduce(torch.ones(4))"
    shown, error = ranks.run("\n" + source, "In[8]")
    assert str(error) == (
        "rank 1 raised ValueError: shard 3 is empty\n"
        "  at In[8]:4: cut(3)\n"
        "  at In[7]:3: raise ValueError(f'shard {n} is empty')\n" + LOST
    )
    assert error is not None
    assert error._render_traceback_() == str(error).splitlines()
    assert shown.texts == {0: "begun\n", 1: "begun\n"}


def test_after_a_failure_the_next_start_is_fresh(ranks: Ranks):
    text(ranks, "x = 1")
    failure(ranks, "if rank: raise KeyError('a')\nelse: raise KeyError('b')")
    with pytest.raises(CellError, match="no ranks yet"):
        ranks.pull("x")
    assert ranks.start(2) == 0
    assert failure(ranks, "x").startswith("ranks 0-1 raised NameError: name 'x' is not defined\n  at In[7]:2: x\n")


def test_ranks_that_fail_alike_keep_their_variables(ranks: Ranks):
    text(ranks, "x = 1")
    reason = "ranks 0-1 raised ZeroDivisionError: division by zero\n  at In[7]:2: x / 0\n"
    assert failure(ranks, "x / 0") == reason + "Every rank failed alike, so the ranks stay and keep their variables."
    assert failure(ranks, "x / 0", only=[1]).startswith("rank 1 raised ZeroDivisionError")
    with pytest.raises(CellError, match="ranks 0-1 raised NameError: name 'y' is not defined"):
        ranks.pull("y")
    assert "SystemExit: 3" in failure(ranks, "raise SystemExit(3)")
    assert text(ranks, "x") == dict.fromkeys([0, 1], "1")


def test_a_syntax_error_costs_nothing(ranks: Ranks):
    text(ranks, "x = 1")
    message = failure(ranks, "y = (1,\nx +")
    assert message.startswith('File "In[7]", line 2')
    assert "SyntaxError" in message.splitlines()[-1]
    assert text(ranks, "x") == dict.fromkeys([0, 1], "1")


def test_ranks_left_alone_are_told_long_before_the_time_is_over():
    ranks = Ranks()
    ranks.start(3)
    try:
        _, error = ranks.run("\nif rank:\n    group.barrier()", "In[9]", timeout=600)
        assert str(error) == (
            "Ranks wait in a collective that the others, which have finished, never enter:\n"
            "  rank 0 finished\n"
            "  rank 1 waits in barrier at In[9]:3: group.barrier()\n"
            f"  rank 2 waits in barrier at In[9]:3: group.barrier()\n{LOST}"
        )
    finally:
        ranks.stop()


def test_a_rank_that_only_takes_longer_is_waited_for(ranks: Ranks):
    source = "import time\nif rank:\n    time.sleep(3.5)\n    print('late')"
    shown, error = ranks.run(source, "In[10]", timeout=60)
    assert error is None
    assert shown.texts == {1: "late\n"}


def test_what_is_printed_is_told_while_the_cell_runs(ranks: Ranks):
    seen: list[dict[int, str]] = []
    ranks.run("if rank:\n    print('a')\n    print('b')", "In[11]", printed=lambda texts: seen.append(dict(texts)))
    assert seen == [{1: "a\n"}, {1: "a\nb\n"}]


def test_a_hang_says_where_each_rank_waits():
    ranks = Ranks()
    ranks.start(3)
    try:
        text(ranks, "x = torch.ones(4)\ndef share():\n    group.all_reduce(x)")
        source = "if rank == 0:\n    share()\nif rank == 1:\n    group.barrier()\nwhile True: pass"
        _, error = ranks.run("\n" + source, "In[8]", timeout=2)
        assert str(error) == (
            "The cell did not end within 2 s:\n"
            "  rank 0 waits in all_reduce at In[7]:4: group.all_reduce(x)\n"
            "  rank 1 waits in barrier at In[8]:5: group.barrier()\n"
            "  rank 2 computes at In[8]:6: while True: pass\n" + LOST
        )
        ranks.start(3)
        assert "rank 0 computes at In[7]:2: while True: pass\n  rank 1 finished" in failure(
            ranks, "while True: pass", only=[0], timeout=1
        )
    finally:
        ranks.stop()


def test_a_rank_that_dies_is_named_and_the_others_errors_are_hidden(ranks: Ranks):
    source = "import os\nif rank:\n    os.kill(os.getpid(), 9)\ngroup.all_reduce(torch.ones(4))"
    message = failure(ranks, source)
    assert message.startswith("rank 1 was killed by SIGKILL")
    assert message.endswith("\n" + LOST)
    assert len(message.splitlines()) == 2


def test_another_number_of_ranks_is_another_world(ranks: Ranks):
    pids = ranks.pull("__import__('os').getpid()")
    assert ranks.start(3) == 2
    assert ranks.pull("world_size") == [3, 3, 3]
    assert ranks.start(3) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where all this is a shell's background job, which ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_the_ranks(ranks: Ranks):
    pids = ranks.pull("__import__('os').getpid()")
    caller = threading.get_ident()

    def interrupt() -> None:
        signal.pthread_kill(caller, signal.SIGINT)

    threading.Timer(0.5, interrupt).start()
    said = failure(ranks, "while True: pass", timeout=30)
    assert re.fullmatch(
        rf"Interrupted:\n  rank 0 computes at In\[\d+\]:\d+: while .*\n  rank 1 computes .*\n{re.escape(LOST)}", said
    )
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ranks_see_the_notebooks_folder(ranks: Ranks):
    assert ranks.pull("__import__('os').getcwd()") == [str(Path.cwd())] * 2


def test_equal_values_are_merged():
    assert merged({1: "b", 0: "a", 2: "a"}) == [([0, 2], "a"), ([1], "b")]
    assert [names(ranks) for ranks in ([2], [0, 1, 2, 3], [0, 2])] == ["rank 2", "ranks 0-3", "ranks 0,2"]
