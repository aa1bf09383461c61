"""`%%ranks` in a shell: its options, its labels, its errors."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

Cell = Callable[[str, str], Any]


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell()
    shell.colors = "nocolor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFIMPL_DEVICE", "what another test has left")
        del os.environ["REFIMPL_DEVICE"]
        shell.extension_manager.load_extension("refimpl.notebook")
        assert os.environ["REFIMPL_DEVICE"] == "cpu", "cells make their tensors there, whatever GPUs there are"
        yield shell
    shell.user_ns["ranks"].stop()
    shell.restore_sys_module_state()
    shell.history_manager.end_session()


@pytest.fixture
def cell(shell: InteractiveShell) -> Cell:
    return lambda line, body: shell.run_cell(f"%%ranks {line}\n{body}", store_history=True)


def test_outputs_are_labelled_and_equal_ones_merged(cell: Cell, capsys: pytest.CaptureFixture[str]):
    assert cell("4", "print(rank // 2)\nworld_size").success
    assert capsys.readouterr().out == "[ranks 0-1] 0\n            4\n[ranks 2-3] 1\n            4\n"
    assert cell("", "'same'").success
    assert cell("4 --only 1,3", "'two'").success
    assert capsys.readouterr().out == "[ranks 0-3] 'same'\n[ranks 1,3] 'two'\n"


def test_another_number_of_ranks_is_announced(cell: Cell, capsys: pytest.CaptureFixture[str]):
    cell("3", "x = 1")
    capsys.readouterr()
    cell("2", "x = 2")
    cell("2", "x")
    assert capsys.readouterr().out == "[2 new ranks; the variables of the 3 before are gone]\n[ranks 0-1] 2\n"


def test_the_notebook_has_push_and_pull(shell: InteractiveShell, cell: Cell):
    cell("2", "pass")
    assert shell.run_cell("ranks.push(n=5)\nranks.pull('n + rank')").result == [5, 6]


def test_a_failure_is_the_report_without_a_traceback(cell: Cell, capsys: pytest.CaptureFixture[str]):
    cell("2", "pass")
    capsys.readouterr()  # what another test has left may be announced as gone
    result = cell("2 --timeout 20", "if rank:\n    raise ValueError('odd')\ngroup.barrier()")
    report = str(result.error_in_exec)
    assert report.startswith("rank 1 raised ValueError: odd\n  at In[")
    assert ":3: raise ValueError('odd')\n" in report  # the magic is line 1
    assert capsys.readouterr().out.strip() == report


def test_cells_have_names_of_their_own_when_the_client_keeps_no_history(shell: InteractiveShell):
    shell.run_cell("%%ranks 2\ndef fail():\n    raise ValueError('odd')", store_history=False)
    result = shell.run_cell("%%ranks 2\n\n\nfail()", store_history=False)
    calls = re.findall(r"at In\[(\d+)\]:(.*)", str(result.error_in_exec))
    assert [line for _, line in calls] == ["4: fail()", "3: raise ValueError('odd')"]
    assert int(calls[0][0]) == int(calls[1][0]) + 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0", "at least 1 rank, not 0"),
        ("2 --only 0,2", "not among the 2 ranks 0 to 1"),
        ("two", "invalid int value: 'two'"),
        ("2 --only x", "invalid"),
        ("2 --often", "unrecognized arguments: --often"),
    ],
)
def test_options_that_make_no_sense_are_one_line(
    cell: Cell, capsys: pytest.CaptureFixture[str], line: str, message: str
):
    assert not cell(line, "1").success
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert "Traceback" not in captured.out + captured.err


def test_tables_and_figures_are_displayed_with_their_ranks(
    shell: InteractiveShell, cell: Cell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    cell("2", "pass")
    capsys.readouterr()
    published: list[set[str]] = []
    monkeypatch.setattr(shell.display_pub, "publish", lambda data: published.append(set(data)))
    assert cell(
        "2", "import pandas as pd\nimport matplotlib.pyplot as plt\nplt.plot([rank])\npd.DataFrame([1])"
    ).success
    assert capsys.readouterr().out == "[rank 0]\n[rank 1]\n"
    assert published == [{"text/plain", "text/html"}, {"image/png", "text/plain"}] * 2


def test_a_long_cell_shows_what_was_printed_so_far(
    cell: Cell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """With nothing too short to be long: each line shows anew, and the end replaces it."""
    monkeypatch.setattr("refimpl.notebook.magic.LONG", 0.0)
    monkeypatch.setattr("refimpl.notebook.magic.AGAIN", 0.0)
    cell("2", "pass")
    capsys.readouterr()
    cell("2 --only 1", "print('a')\nprint('b')")
    shown = [text for text in re.split(r"\x1b\[2K\r", capsys.readouterr().out) if text]
    assert shown == ["[rank 1] a\n", "[rank 1] a\n         b\n", "[rank 1] a\n         b\n"]
