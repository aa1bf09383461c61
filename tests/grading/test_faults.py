"""Whatever an answer does, its learner gets a short text that names the mistake and the line, in seconds."""

from pathlib import Path

import pytest
from answers import EXERCISE, graded, grader

pytestmark = pytest.mark.xdist_group("grading")


FAULTS = {
    "endless loop": ("while True:\n    pass", ["never ends", "rank 0 computes at exercise.py:"]),
    "endless loop of collectives": (
        "while True:\n    group.barrier() or group.all_reduce(x)",
        ["collectives in this case"],
    ),
    "endless prints": ("while True:\n    print('x' * 1000)", ["never ends", "the last 15 lines of"]),
    "sys.exit": ("import sys\nsys.exit(0)", ["sys.exit", "exercise.py:6 in double"]),
    "breakpoint": ("breakpoint()\nreturn x", ["double asks for the keyboard", "exercise.py:6 in double"]),
    "input": ("return x * int(input())", ["double asks for the keyboard", "exercise.py:5 in double"]),
    "os._exit": ("import os\nos._exit(0)", ["ends its process: rank", "exited with code 0"]),
    "too many ranks": (
        "from refimpl import launch\nlaunch.run(print, ranks=1000)",
        ["starts 1000 more ranks", "launch.run(print, ranks=1000)"],
    ),
    "too much memory": ("return torch.ones(10**12)", ["can't allocate memory", "torch.ones(10**12)"]),
    "unknown name": ("return numpy.array(x)", ["NameError", "`numpy`", "import missing", "exercise.py:5 in double"]),
    "unknown module": ("import nunpy", ["No module named 'nunpy'", "exercise.py:5"]),
    "exception": ("return x[7]", ["double raised IndexError", "exercise.py:5 in double", "return x[7]"]),
    "what a collective returns": (
        "return group.all_reduce(x)",
        ["the result is a Work: a collective fills the tensor that it is given"],
    ),
    "and goes on with it": (
        "return 2 + group.all_reduce(x)",
        ["double raised TypeError", "A collective fills the tensor that it is given"],
    ),
    "torch.distributed's methods": (
        "return x * group.size()",
        ["group.rank and group.size are numbers, without ()"],
    ),
    "no such thing of the group": (
        "return x * group.world_size",
        ["`group` has `rank`, `size`, and the calls that the head of this file lists"],
    ),
    "a stable argsort along 0": (
        "return x.argsort(0, descending=True, stable=True)",
        ["torch wants the dimension by its name: x.argsort(dim="],
    ),
    "a gradient that is not there": ("return x.grad.reshape(-1)", ["A `.grad` is None there"]),
    "an uneven all_to_all": (
        "group.all_to_all(x.new_empty(3), x.new_ones(3))",
        ["x has 3 rows, which 2 ranks cannot share equally", "is x cut into a chunk a rank", "Splits are for"],
    ),
    "splits that do not fit": (
        "group.all_to_all(x.new_empty(3), x, in_splits=[2, 1], out_splits=[2, 1])",
        ["in_splits: how many rows of x go to each rank"],
    ),
    "the rank before the tensor": (
        "group.send(1 - group.rank, x)",
        ["first the tensor, which recv fills, then the rank"],
    ),
    "what recv does not return": (
        "return group.recv(1 - group.rank)",
        ["first the tensor, which recv fills, then the rank"],
    ),
    "the stub's line left in": (
        'x *= 2\nraise NotImplementedError("double")',
        ["double comes to its `raise NotImplementedError`, line 6: take that line out"],
    ),
    "no return": ("x * 2", ["the result is None: is there a `return`?"]),
    "wrong shape": ("return torch.cat([x, x])", ["has shape (4,), expected (2,)"]),
    "wrong dtype": ("return x.double() * 2", ["torch.float64, expected torch.float32"]),
    "sums": (
        "y = x * 2\ngroup.all_reduce(y)\nreturn y",
        ["the result: wrong values", "expected [2, 4]", "found    [4, 8]"],
    ),
    "own prints": (
        "print('shape', tuple(x.shape))\nreturn x",
        ["the result: wrong values", "your prints:", "[rank 1] shape (2,)"],
    ),
    "one rank stays away": (
        "if group.rank == 0:\n    group.all_reduce(x)\nreturn x * 2",
        ["some ranks have finished", "rank 0 waits in all_reduce at exercise.py:6", "rank 1 finished"],
    ),
    "different collectives": (
        "y = x.clone()\nif group.rank:\n    group.recv(y, 0)\nelse:\n    group.all_reduce(y)\nreturn y",
        ["double", "rank 0                    rank 1", "recv from 0"],
    ),
    "a ring of which one rank stays away": (
        "y = torch.empty_like(x)\nif group.rank:\n    group.send_recv(x, 0, y, 0)\nreturn x * 2",
        ["some ranks have finished", "send to 0, 8 bytes", "recv from 0"],
    ),
    "nobody sends": (
        "group.recv(x, 1 - group.rank)\nreturn x",
        ["every rank waits to receive, and none sends", "rank 1 waits in recv at exercise.py:5"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_in_the_learners_terms(fault: str, tmp_path: Path) -> None:
    body, words = FAULTS[fault]
    verdict = graded(tmp_path, body)
    assert verdict.outcome == "fail"
    for word in words:
        assert word in verdict.text, verdict.text
    assert "Traceback" not in verdict.text
    assert len(verdict.text.splitlines()) <= 25


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    verdict = graded(tmp_path, "for i in range(3)\n    pass")
    assert verdict.headline == "exercise.py line 5 is not Python: expected ':'"
    assert "for i in range(3)" in verdict.text


@pytest.mark.parametrize("head", ["import nunpy", "while True: pass", "raise SystemExit", "1 / 0", "print(torch)"])
def test_a_file_that_cannot_be_imported(head: str, tmp_path: Path) -> None:
    verdict = graded(tmp_path, "return x * 2", head)
    assert verdict.outcome == "fail"
    assert "exercise.py" in verdict.text
    assert "1" in verdict.text  # the line


@pytest.mark.parametrize("arguments", ["x", "group, x, y"])
def test_other_arguments_than_the_stubs(arguments: str, tmp_path: Path) -> None:
    file = tmp_path / "exercise.py"
    file.write_text(f"def double({arguments}):\n    return x * 2\n")
    verdict = grader().grade(EXERCISE, file)
    assert verdict.headline == "double takes other arguments than in the stub: leave its name and its arguments"


def test_a_name_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "exercise.py"
    file.write_text("def dubble(group, x):\n    return 2 * x\n")
    assert grader().grade(EXERCISE, file).headline == "exercise.py has no `double`"


def test_the_next_answer_is_graded_as_if_nothing_had_been(tmp_path: Path) -> None:
    assert graded(tmp_path, "group.send(x, 1 - group.rank, async_op=True)\nreturn x").outcome == "fail"
    assert graded(tmp_path, "return x * 2").outcome == "pass"


def test_a_stub_is_todo_and_starts_no_rank(tmp_path: Path) -> None:
    verdict = graded(tmp_path, 'raise NotImplementedError("double")')
    assert (verdict.outcome, verdict.headline) == ("todo", "double: not written yet")


def test_what_calls_a_stub_is_todo(tmp_path: Path) -> None:
    head = 'def helper():\n    raise NotImplementedError("helper")\n'
    verdict = graded(tmp_path, "return helper()", head)
    assert (verdict.outcome, verdict.headline) == ("todo", "helper is not written yet")


def test_what_torch_has_not_implemented_is_no_stub(tmp_path: Path) -> None:
    verdict = graded(tmp_path, "return x.to_sparse().untyped_storage()")
    assert verdict.outcome == "fail"
    assert "double raised NotImplementedError: Cannot access storage" in verdict.text


def test_a_folder_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    body = "import os, tempfile\nwith tempfile.TemporaryDirectory() as place:\n    os.chdir(place)\nreturn x * {}"
    assert "left this changed for the whole process: os.chdir" in graded(tmp_path, body.format(3)).text
    assert graded(tmp_path, body.format(2)).outcome == "pass"
    assert graded(tmp_path, "import os\nos.getcwd()\nreturn x * 2").outcome == "pass"


def test_a_grader_that_has_been_left_starts_its_ranks_again(tmp_path: Path) -> None:
    assert graded(tmp_path, "return x * 2").outcome == "pass"
    grader().__exit__(None, None, None)
    assert graded(tmp_path, "return x * 2").outcome == "pass"
