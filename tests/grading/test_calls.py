"""A way round an exercise is named also if it gets there at run time; an honest answer may call what it is given."""

import sys
import threading
from pathlib import Path

import pytest
from answers import EXERCISE, graded, grader

from refimpl.grading.calls import Calls, unwatched

pytestmark = pytest.mark.xdist_group("grading")

ROOT = Path(__file__).parents[2]
OWN = "refimpl.comm.ring.all_reduce is refimpl's own"
AROUND = "torch.distributed.all_reduce goes round the group"
RING = "('ref' + 'impl.comm.ring')"
BODIES = {
    "importlib": (f"import importlib\nimportlib.import_module{RING}.all_reduce(group, x)", OWN),
    "__import__": ("__import__('ref' + 'impl.comm.ring').comm.ring.all_reduce(group, x)", OWN),
    "sys.modules": (
        f"import sys, importlib\nimportlib.import_module{RING}\nsys.modules[{RING}].all_reduce(group, x)",
        OWN,
    ),
    "getattr": (
        "import refimpl\ngetattr(refimpl, 'Ze' + 'ro2')(x)",
        "refimpl.zero.stage.Stage.__init__ is refimpl's own",
    ),
    "map": (f"import importlib\nlist(map(importlib.import_module{RING}.all_reduce, [group], [x]))", OWN),
    "handed to a thread": (
        "import importlib, threading\n"
        f"threading.Thread(target=importlib.import_module{RING}.all_reduce, args=(group, x)).start()",
        OWN,
    ),
    "handed to a pool": (
        "import importlib, concurrent.futures\n"
        f"concurrent.futures.ThreadPoolExecutor(1).submit(importlib.import_module{RING}.all_reduce, group, x).result()",
        OWN,
    ),
    "exec": ("exec('from refimpl' + '.comm import ring; ring.all_reduce(group, x)')", "exec makes code at run time"),
    "torch.distributed": ("getattr(torch, 'distri' + 'buted').all_reduce(x)", AROUND),
    "the grader's own": ("getattr(group, 'every' + 'one')(1)", "group.everyone is for the grader"),
    "a barrier": ("group.barrier()", "group.barrier is not among the calls of `group` that the exercise lists"),
    "a solution": (
        "import importlib.util\n"
        f"path = {str(ROOT)!r} + '/solu' + 'tions/01_collectives.py'\n"
        "spec = importlib.util.spec_from_file_location('other', path)\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.ring_all_reduce(group, x)",
        "a function of the solutions is called",
    ),
}


@pytest.mark.parametrize("how", BODIES)
def test_a_call_is_named_with_its_line(how: str, tmp_path: Path) -> None:
    body, says = BODIES[how]
    verdict = graded(tmp_path, f"{body}\nreturn x.new_tensor([2.0, 4.0])")
    assert verdict.outcome == "fail"
    assert says in verdict.headline
    assert verdict.headline.startswith(f"exercise.py line {4 + len(body.splitlines())}: ")


def test_a_thread_of_the_answer_is_looked_at(tmp_path: Path) -> None:
    body = (
        "import importlib, threading\n"
        "def go():\n"
        f"    importlib.import_module{RING}.all_reduce(group, x)\n"
        "thread = threading.Thread(target=go)\nthread.start()\nthread.join()\nreturn x"
    )
    assert OWN in graded(tmp_path, body).headline


def test_what_a_file_makes_while_it_is_read_is_named_too(tmp_path: Path) -> None:
    head = "import torch\nexec('def twice(x): return x * 2')"
    assert "line 2: exec makes code at run time" in graded(tmp_path, "return twice(x)", head).headline


def test_an_answer_may_have_a_thread_of_its_own(tmp_path: Path) -> None:
    body = (
        "import threading\ny = x.clone()\nthread = threading.Thread(target=group.all_reduce, args=(y,))\n"
        "thread.start()\nthread.join()\nreturn y"
    )
    assert graded(tmp_path, body).outcome == "pass"


def test_a_task_that_is_refimpls_own_function_is_named(tmp_path: Path) -> None:
    file = tmp_path / "exercise.py"
    file.write_text("import importlib\ndouble = importlib.import_module('ref' + 'impl.comm.ring').all_reduce\n")
    verdict = grader().grade(EXERCISE, file)
    assert (verdict.outcome, OWN in verdict.headline) == ("fail", True)


def test_a_transfer_that_is_let_go_of_is_no_call(tmp_path: Path) -> None:
    body = "group.all_reduce(x.clone(), async_op=True)\nreturn x * 2"  # its generator is closed in the answer's line
    assert graded(tmp_path, body).outcome == "pass"


def test_who_looked_before_looks_on() -> None:
    def look(*_: object) -> None: ...

    before = sys.getprofile(), threading.getprofile()
    sys.setprofile(look)
    threading.setprofile(look)
    try:
        with unwatched():
            assert sys.getprofile() is None
        assert sys.getprofile() is look
        with Calls(Path("exercise.py")).watched():
            assert sys.getprofile() is not look
        after = sys.getprofile(), threading.getprofile()
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    assert after == (look, look)


def test_an_answer_may_print(tmp_path: Path) -> None:
    body = "import sys\nprint('x', x)\nprint(x, file=sys.stderr, flush=True)\nsys.stdout.write('.')\nreturn x * 2"
    assert graded(tmp_path, body).text == ""


def test_an_answer_may_call_its_group_and_look_at_the_ledger(tmp_path: Path) -> None:
    body = "y = x.clone()\ngroup.all_reduce(y, async_op=True).wait()\nassert group.ledger.sent_bytes()\nreturn y"
    assert graded(tmp_path, body).outcome == "pass"
