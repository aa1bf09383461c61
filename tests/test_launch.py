"""Real processes: what they return, and what their caller is told when one raises, hangs or dies."""

import ctypes
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import worlds
from torch import nn

import refimpl.deepspeed
from refimpl import launch
from refimpl.checkpoint.errors import together
from refimpl.comm.group import Group
from refimpl.comm.link import Link
from refimpl.ranks import stand
from refimpl.ranks.errors import failed
from refimpl.ranks.meet import devices_of, tell_if_too_few

ROOT = Path(__file__).parents[1]


def here(fn: Callable[..., Any], source: str) -> str:
    """ "file:line" of the one line of fn that contains source."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(lines) if source in line]
    return f"{__file__}:{first + offset}"


def runs(pid: int) -> bool:
    """A zombie, which init has yet to collect, does not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ends(pid: int) -> bool:
    """Within ten seconds: a killed process ends when it is next given a core."""
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(10)
    return not runs(pid)


def python(script: Path, *args: str, module: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, *module, str(script), *args]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heeds_ctrl_c,
    )


def heeds_ctrl_c() -> None:
    """What a shell starts in the background ignores it, and so would all that is started from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def sum_of_ranks(start: int) -> tuple[int, torch.Tensor]:
    x = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(x)
    return dist.get_rank(), x


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_results_come_in_rank_order(ranks: int):
    results = launch.run(sum_of_ranks, 10, ranks=ranks)
    assert [rank for rank, _ in results] == list(range(ranks))
    assert all(x.item() == 10 * ranks + sum(range(ranks)) for _, x in results)


def test_worlds_may_start_in_several_threads():
    """Each hides `__main__` from its ranks for a moment; afterwards it is there again."""
    main = sys.modules["__main__"]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda i: launch.run(lambda: i), range(6))) == [[i, i] for i in range(6)]
    assert sys.modules["__main__"] is main


def test_every_world_is_new():
    def mark() -> tuple[int, bool]:
        seen = hasattr(torch, "mark")
        torch.mark = True  # type: ignore[attr-defined]
        return os.getpid(), seen

    results = launch.run(mark) + launch.run(mark)
    assert len({pid for pid, _ in results} | {os.getpid()}) == 5
    assert not any(seen for _, seen in results)


@dataclass
class Point:
    x: torch.Tensor


def shifted(point: Point) -> Point:
    return Point(point.x + dist.get_rank())


def test_closures_lambdas_and_classes_of_this_file_travel():
    base = torch.arange(3)
    assert launch.run(lambda: (base + dist.get_rank()).tolist()) == [[0, 1, 2], [1, 2, 3]]
    first, second = launch.run(shifted, Point(base))
    assert type(first) is type(second) is Point
    assert second.x.tolist() == [1, 2, 3]


def test_a_function_may_use_the_name_of_a_module_that_cannot_be_pickled():
    """cloudpickle takes torch.distributed.config for used here; it is no plain module."""
    engine = SimpleNamespace(config=2)

    def work() -> float:
        import torch.distributed as dist

        return torch.ones(1).item() * engine.config + dist.get_rank()

    assert launch.run(work) == [2.0, 3.0]


@pytest.mark.parametrize("namesake", [False, True])
def test_a_module_that_no_import_finds_travels_by_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, namesake: bool
):
    source = "import torch.distributed as dist\nbase = 5\ndef helper():\n    return base + dist.get_rank()\n"
    (tmp_path / "elsewhere.py").write_text(source)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        elsewhere = importlib.import_module("elsewhere")
    del sys.modules["elsewhere"]
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)  # and out again afterwards
    if namesake:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "elsewhere.py").write_text("def helper():\n    return 'not me'\n")
        monkeypatch.syspath_prepend(tmp_path / "other")
    assert launch.run(elsewhere.helper) == [5, 6]
    assert launch.run(lambda: elsewhere.helper()) == [5, 6]


def test_a_script_needs_no_main_guard_and_is_not_imported_again(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "from refimpl import launch\n"
        "print('top')\n"
        "class Mine:\n    pass\n"
        "def f(x):\n    return Mine()\n"
        "a, b = launch.run(f, 1)\n"
        "print(type(a) is Mine, __file__ == __import__('sys').modules['__main__'].__file__)\n"
    )
    process = python(script)
    assert process.communicate(timeout=60)[0].splitlines() == ["top", "True True"]


def test_a_rank_knows_its_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINE", "passed on")
    monkeypatch.setenv("MASTER_ADDR", "a launcher of the caller's")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "REFIMPL_DEVICE", "OMP_NUM_THREADS", "MINE")

    def look() -> tuple[list[str], int, str, bool]:
        return [os.environ[n] for n in names], torch.get_num_threads(), os.getcwd(), launch.under_torchrun()

    monkeypatch.chdir(ROOT / "tests")
    for rank, found in enumerate(launch.run(look, ranks=2, threads=2, device="cpu")):
        environment = [str(rank), str(rank), "2", "2", "cpu", "2", "passed on"]
        assert found == (environment, 2, str(ROOT / "tests"), False)


def test_output_arrives_whole_and_in_each_ranks_order(capsys: pytest.CaptureFixture[str]):
    def talk() -> None:
        for i in range(20):
            print("rank", dist.get_rank(), "line", i)
        print("rank", dist.get_rank(), "ends", end="", file=sys.stderr)

    launch.run(talk, ranks=3)
    out, err = capsys.readouterr()
    for rank in range(3):
        mine = [line for line in out.splitlines() if line.startswith(f"rank {rank}")]
        assert mine == [f"rank {rank} line {i}" for i in range(20)]
        assert err.count(f"rank {rank} ends") == 1


def test_reports_reach_the_caller_while_the_ranks_run():
    def work(answers: str) -> int:
        launch.report({"rank": dist.get_rank(), "x": torch.ones(2)})
        return len(open(answers).read())  # a fifo: blocks until the caller, having heard every report, has written

    def listen(rank: int, obj: dict[str, Any]) -> None:
        heard.append((rank, obj["rank"], obj["x"].sum().item()))
        if len(heard) == 3:
            threading.Thread(target=answer, args=(fifos,)).start()

    def answer(paths: list[str]) -> None:
        for path in paths:
            Path(path).write_text("go")

    heard: list[tuple[int, int, float]] = []
    with launch.World(3) as world:
        fifos = [str(world.setup.directory / f"fifo{rank}") for rank in range(3)]
        for fifo in fifos:
            os.mkfifo(fifo)
        assert world.call(lambda: work(fifos[dist.get_rank()]), on_report=listen) == [2, 2, 2]
    assert sorted(heard) == [(0, 0, 2.0), (1, 1, 2.0), (2, 2, 2.0)]


def test_a_report_starts_the_timeout_anew(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(late=0.0, monotonic=lambda: time.monotonic() + clock.late)

    def work() -> str:
        for i in range(4):
            launch.report(i)
        return "done"

    def listen(rank: int, obj: int) -> None:
        clock.late += 50

    for module in ("world", "silence"):
        monkeypatch.setattr(f"refimpl.ranks.{module}.time", clock)
    assert launch.run(work, ranks=1, timeout=60, on_report=listen) == ["done"]
    assert clock.late == 200


def test_report_outside_a_rank_does_nothing():
    launch.report("nobody listens")


def test_a_world_keeps_its_processes_from_call_to_call():
    with launch.World(2) as world:
        first = world.call(os.getpid)
        with pytest.raises(launch.RankError, match="rank 0 raised ZeroDivisionError"):
            world.call(lambda: 1 // dist.get_rank())
        assert world.call(os.getpid) == first
        heard: list[tuple[int, str, str]] = []
        world.call(lambda: print("hello"), on_output=lambda *output: heard.append(output))
        assert sorted(heard) == [(0, "stdout", "hello\n"), (1, "stdout", "hello\n")]
    assert not world.alive
    with pytest.raises(RuntimeError, match="were stopped"):
        world.call(os.getpid)
    assert not world.setup.directory.exists()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("shard 3")
    dist.barrier()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_rank_that_raised_is_named_with_its_own_traceback(ranks: int):
    with pytest.raises(launch.RankError) as caught:
        launch.run(fail_on, ranks - 1, ranks=ranks)
    text = str(caught.value)
    assert text.startswith(f"rank {ranks - 1} raised KeyError: 'shard 3'\n")
    file, line = here(fail_on, "raise KeyError").rsplit(":", 1)
    assert f'File "{file}", line {line}, in fail_on\n    raise KeyError("shard 3")' in text
    assert "refimpl/ranks" not in text
    assert caught.value.rank == ranks - 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("shard 3",)


def test_lost_connections_that_come_first_are_not_mistaken_for_the_cause(tmp_path: Path):
    def work() -> None:
        mine = tmp_path / str(dist.get_rank())
        if dist.get_rank() == 1:
            dist.destroy_process_group()  # the others' connections close
            for other in (0, 2):
                open(tmp_path / str(other)).close()  # a fifo: until that rank has seen it
            raise ValueError("the cause")
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            open(mine, "w").close()

    for rank in (0, 2):
        os.mkfifo(tmp_path / str(rank))
    with pytest.raises(launch.RankError, match=r"^rank 1 raised ValueError: the cause"):
        launch.run(work, ranks=3)


def test_of_ranks_that_fail_together_the_one_is_raised_that_the_others_have_heard_of(tmp_path: Path):
    def work() -> None:
        group = Group.world()

        def do() -> None:
            if group.rank == 1:
                raise ValueError("the cause")

        try:
            together(group, do)
        finally:
            for other in (0, 2):  # a fifo: rank 1 ends when that rank does
                if group.rank in (1, other):
                    open(tmp_path / str(other), "r" if group.rank == 1 else "w").close()

    for rank in (0, 2):
        os.mkfifo(tmp_path / str(rank))
    text = r"^rank 1 raised .*CheckpointError: rank 1: ValueError\('the cause'\)(?s:.*)in do\n"
    with pytest.raises(launch.RankError, match=text) as caught:
        launch.run(work, ranks=3)
    assert caught.value.rank == 1


def test_a_lost_connection_without_a_cause_is_told_all_the_same():
    def work() -> None:
        raise ConnectionResetError("Connection reset by peer")

    with pytest.raises(launch.RankError, match="raised ConnectionResetError: Connection reset by peer"):
        launch.run(work)


class Stubborn(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_an_exception_that_cannot_be_pickled_is_still_told():
    def work() -> None:
        try:
            raise OSError("deep down")
        except OSError as error:
            raise Stubborn(1, 2) from error

    with pytest.raises(launch.RankError, match=r"raised .*Stubborn: 1 and 2") as caught:
        launch.run(work)
    assert caught.value.__cause__ is None
    assert "OSError: deep down" in str(caught.value)


def test_a_result_that_cannot_be_pickled_names_the_rank():
    with pytest.raises(launch.RankError, match=r"^rank 1 raised TypeError: fn's result, a lock, cannot be pickled"):
        launch.run(lambda: threading.Lock() if dist.get_rank() == 1 else None)


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def test_a_result_that_cannot_be_read_names_the_rank():
    with pytest.raises(launch.RankError, match=r"^what rank 0 sent cannot be unpickled here: ValueError\(.*no number"):
        launch.run(Unreadable, ranks=1)


def test_what_cannot_travel_to_the_ranks_is_told_and_they_go_on():
    lock = threading.Lock()
    with launch.World(1, device="cpu") as world:
        with pytest.raises(TypeError, match=r"what the ranks are given cannot be pickled: .*lock.* Make it inside fn"):
            world.call(lambda: lock)
        assert world.call(lambda: 3) == [3]


def test_a_call_while_another_is_under_way_is_refused():
    """It would take the results of the other for its own."""
    refused = []

    def listen(rank: int, _: object) -> None:
        with pytest.raises(RuntimeError, match="in another call: wait until it has returned"):
            world.call(dist.get_rank)
        refused.append(rank)

    with launch.World(2, device="cpu") as world:
        assert world.call(lambda: launch.report(1) or 7, on_report=listen) == [7, 7]
    assert sorted(refused) == [0, 1]


def test_sys_exit_in_a_rank_is_an_error():
    with pytest.raises(launch.RankError, match=r"^rank 0 raised SystemExit: 3"):
        launch.run(lambda: sys.exit(3), ranks=1)


def hang(rank_that_computes: int) -> None:
    if dist.get_rank() == rank_that_computes:
        while True:
            pass
    if dist.get_rank() == 2:
        return
    dist.all_reduce(torch.ones(1))


def test_a_hang_tells_for_each_rank_where_it_stands():
    with pytest.raises(launch.RankTimeout) as caught:
        launch.run(hang, 1, ranks=3, timeout=2)
    lines = str(caught.value).splitlines()
    assert lines[0] == "no rank gave a result or a report for 2 s"
    assert lines[1] == f"  rank 0 waits in all_reduce at {here(hang, 'all_reduce')}: dist.all_reduce(torch.ones(1))"
    assert lines[2].startswith(f"  rank 1 computes at {__file__}:")
    assert lines[3] == "  rank 2 finished"
    assert len(lines) == 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_computes_on_is_asked_by_no_signal(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The handler would read the frames of threads that run: it has ended ranks with SIGSEGV."""
    told: list[str] = []  # of rank 0 while it computes
    late = "did not say where it stands"  # within two seconds, on a busy machine

    def asked(*given: Any, **options: Any) -> dict[int, str]:
        does = stand.stand(*given, **options)
        if sum(what.startswith("computes at") for what in told) < 3:
            told.append(does[0])
        elif does[1] == "finished":
            (tmp_path / "enough").touch()
        return does

    def compute() -> int:
        if dist.get_rank():
            return 1
        beside = threading.Thread(target=lambda: [None for _ in iter((tmp_path / "enough").exists, True)])
        beside.start()
        while not (tmp_path / "enough").exists():
            pass
        beside.join()
        return 0

    monkeypatch.setattr("refimpl.ranks.world._ALONE", 0.01)
    monkeypatch.setattr("refimpl.ranks.world.stand", asked)
    monkeypatch.setattr("refimpl.ranks.stand.os.kill", lambda *_: pytest.fail("a signal was sent"))
    assert launch.run(compute, ranks=ranks, timeout=600) == [0, *[1] * (ranks - 1)]
    assert all(what.startswith(("computes", late)) for what in told), told


def test_a_rank_whose_c_code_keeps_pythons_lock_says_where_it_stands_before_it_is_ended():
    def keep() -> None:
        ctypes.PyDLL(None).pause()

    with pytest.raises(launch.RankTimeout, match=rf"\n  rank 0 computes at {re.escape(here(keep, 'PyDLL'))}"):
        launch.run(keep, ranks=1, timeout=1)


def apart() -> None:
    group = Group.world()
    if group.rank == 0:
        group.barrier()
    else:
        group.all_reduce(torch.ones(1))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_wait_for_each_other_in_different_calls_are_told(ranks: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("refimpl.ranks.world._TOGETHER", 0.3)
    with pytest.raises(launch.RankTimeout, match="every rank waits") as caught:
        launch.run(apart, ranks=ranks, timeout=600)
    _, *lines = str(caught.value).splitlines()
    calls = [f"barrier at {here(apart, 'barrier')}", *[f"all_reduce at {here(apart, 'all_reduce')}"] * (ranks - 1)]
    assert [line.split(": ")[0] for line in lines] == [f"  rank {r} waits in {call}" for r, call in enumerate(calls)]


def test_a_rank_blocked_in_torchs_own_wait_is_found():
    def work() -> None:
        if dist.get_rank() == 0:
            request = dist.all_reduce(torch.ones(1), async_op=True)
            request.wait()

    with pytest.raises(launch.RankTimeout, match=r"rank 0 waits in wait at .*: request\.wait\(\)\n  rank 1 finished"):
        launch.run(work, timeout=600)


@pytest.mark.parametrize(("stage", "steps", "ranks"), [(0, 2, 2), (3, 2, 3), (0, 0, 3), (3, 0, 2), (3, 0, 3)])
def test_a_rank_that_returns_early_is_told_long_before_the_time_is_over(stage: int, steps: int, ranks: int):
    def work() -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        engine = refimpl.deepspeed.initialize(model=nn.Linear(4, 4), config=config)[0]
        for _ in range(steps if dist.get_rank() == 1 else 3):
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()

    with pytest.raises(launch.RankTimeout) as caught:
        launch.run(work, ranks=ranks, timeout=600)
    head, *lines = str(caught.value).splitlines()
    assert head == "ranks wait in a collective that the others, which have finished, never enter"
    source = "engine.backward(engine(torch.ones(1, 4)).sum())"  # not the line of ours that waits for its gradients
    call = "wait"
    if not steps:  # no path is known yet; a group over gloo has none yet for the second halves of its all-reduces
        call = "hear_all" if stage == 3 else "all_reduce" if worlds.NEAR == "gloo" else "wait"
    waits = f"waits in {call} at {here(work, 'backward')}: {source}"
    assert lines == [f"  rank {rank} {'finished' if rank == 1 else waits}" for rank in range(ranks)]


def test_ranks_that_wait_for_a_slow_link_or_a_program_are_not_left_alone():
    def work(kind: str) -> str:
        rank = dist.get_rank()
        if kind == "program" and rank == 0:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3.5)"]).wait()
        if kind == "link" and rank < 2:
            group = Group.world(link=Link(1e6, 1e-3))
            x = torch.ones(100_000)  # 3.2 s
            group.send(x, 1) if rank == 0 else group.recv(x, 0)
        return kind

    for kind in ("program", "link"):
        assert launch.run(work, kind, ranks=3) == [kind] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_named_and_the_others_are_stopped(ranks: int):
    def work() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(launch.RankDied, match=r"^rank 1 was killed by SIGKILL") as caught:
        launch.run(work, ranks=ranks)
    assert caught.value.rank == 1


def test_a_rank_that_exits_tells_its_code():
    with pytest.raises(launch.RankDied, match=r"^rank 0 exited with code 3 before"):
        launch.run(lambda: os._exit(3), ranks=1)


def test_a_rank_killed_by_a_signal_without_a_name_is_told_its_number():
    assert str(failed(1, -40).error).startswith("rank 1 was killed by signal 40")


def child_exits() -> int:
    """In a rank. -> the code of a child that it forked."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # a process of threads is forked
        child = os.fork()
    if not child:
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_of_a_rank_speaks_for_no_rank():
    assert launch.run(child_exits) == [3, 3]


def test_a_forked_child_of_the_caller_leaves_the_ranks_alone():
    with launch.World(2) as world:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            child = os.fork()
        if not child:
            world.stop()
            world.kill()  # as at exit
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert world.call(dist.get_rank) == [0, 1]


def test_a_stopped_world_leaves_no_process():
    pids: list[int] = []
    with pytest.raises(launch.RankTimeout):
        launch.run(lambda: (launch.report(os.getpid()), hang(0)), timeout=2, on_report=lambda _, pid: pids.append(pid))
    assert len(pids) == 2
    assert not any(runs(pid) for pid in pids)


def work_with_a_child(how: str) -> None:
    launch.report(subprocess.Popen(["sleep", "1000"]).pid)
    if dist.get_rank() == 1 and how == "exit":
        os._exit(1)
    if dist.get_rank() == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "return":
        dist.barrier()


@pytest.mark.parametrize("how", ["exit", "kill", "return"])
def test_what_a_rank_started_ends_with_it(how: str):
    children: list[int] = []
    died = pytest.raises(launch.RankDied) if how != "return" else nullcontext()
    with died:
        launch.run(work_with_a_child, how, on_report=lambda _, pid: children.append(pid))
    assert len(children) == 2
    assert all(ends(pid) for pid in children)


CALLER = """
import os, subprocess, sys
from refimpl import launch
def stay():
    subprocess.Popen(["sleep", "1000"])
    launch.report(os.getpid())
    while True:
        pass
launch.run(stay, ranks=2, timeout=None, on_report=lambda rank, pid: print(pid, flush=True))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_its_caller(tmp_path: Path, how: signal.Signals):
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    process = python(script)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(how)
    # Caller, fork server, ranks and the processes they started all hold the pipe: its end is the end of all.
    process.communicate(timeout=60)
    assert process.returncode == -how
    assert not any(runs(pid) for pid in pids)


@pytest.mark.parametrize("ranks", [0, -1])
def test_too_few_ranks_are_refused(ranks: int):
    with pytest.raises(ValueError, match=f"ranks must be at least 1, not {ranks}"):
        launch.run(os.getpid, ranks=ranks)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'auto', 'cpu' or 'cuda', not 'tpu'"):
        launch.run(os.getpid, device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(RuntimeError, match="torch finds no GPU"):
        launch.run(os.getpid, device="cuda")


def test_join_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node"):
        launch.join()


TORCHRUN = """
import sys, torch, torch.distributed as dist
from refimpl import launch
assert launch.under_torchrun()
launch.join()
x = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(x)
launch.report("nobody listens")
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(f"{x.item()} of {dist.get_world_size()} on {dist.get_backend()}")
"""


def test_a_script_adopts_torchruns_ranks(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = python(script, str(tmp_path), module=torchrun)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert [(tmp_path / rank).read_text()[:6] for rank in "01"] == ["3 of 2"] * 2


def test_auto_is_the_cpu_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a notebook, whose cells make their tensors there, and of these tests."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for said, found in (("cuda:1", "nccl"), ("cpu", "gloo")):
        monkeypatch.setenv("REFIMPL_DEVICE", said)
        assert devices_of(2, "auto")[0] == found
        assert devices_of(2, "cuda") == ("nccl", ["cuda:0", "cuda:1"])
    monkeypatch.delenv("REFIMPL_DEVICE")
    assert devices_of(4, "auto") == ("nccl", [f"cuda:{rank}" for rank in range(4)])


def test_more_ranks_than_gpus_are_told_that_they_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no two on one GPU, and nobody sees by the results where they were computed."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("REFIMPL_DEVICE", raising=False)
    with pytest.warns(UserWarning, match=r"finds 1 GPU for 2 ranks .* all compute on the CPU: .*device='cuda'"):
        assert launch.run(os.getpid, ranks=2)
    tell_if_too_few(1, "auto")
    tell_if_too_few(2, "cuda")
    monkeypatch.setenv("REFIMPL_DEVICE", "cpu")
    tell_if_too_few(2, "auto")
