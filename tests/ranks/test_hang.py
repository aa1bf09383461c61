"""Reading a faulthandler dump: which call waits, and at which line of the reader's."""

from pathlib import Path

import torch

from refimpl.ranks import hang

DIST = Path(torch.__file__).parent / "distributed" / "distributed_c10d.py"
GROUP = Path(hang.__file__).parents[1] / "comm" / "group.py"
RANK = Path(hang.__file__).with_name("rank.py")


def dump(*frames: str) -> str:
    """One thread's stack: frames "file:line function", innermost first."""
    lines = ["Current thread 0x00007f00 (most recent call first):"]
    for frame in frames:
        place, function = frame.split(" ")
        file, line = place.rsplit(":", 1)
        lines.append(f'  File "{file}", line {line} in {function}')
    return "\n".join(lines) + "\n"


def test_the_collective_is_the_call_that_the_readers_line_made(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("def step():\n    group.reduce_scatter(out, x)\n")
    stack = dump(
        f"{DIST}:9 all_to_all_single",
        f"{DIST}:8 wrapper",
        f"{GROUP}:7 _exchange",
        f"{GROUP}:6 reduce_scatter",
        f"{script}:2 step",
        f"{DIST}:5 barrier",
        f"{RANK}:4 run",
        "<string>:1 <module>",
    )
    assert hang.is_complete(stack)
    assert hang.where(stack) == f"waits in reduce_scatter at {script}:2: group.reduce_scatter(out, x)"


def test_a_stack_without_a_collective_computes(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("while True:\n    pass\n")
    assert hang.where(dump(f"{script}:2 step", f"{RANK}:4 run")) == f"computes at {script}:2: pass"


def test_a_kernel_in_the_interpreter_stands_at_its_own_line(tmp_path: Path):
    """Seen of a learner's endless loop: Triton's code was taken for where it stands."""
    script, triton = tmp_path / "kernel.py", Path(hang.TORCH).with_name("triton")
    script.write_text("top = tl.maximum(top, new)\n")
    stack = dump(f"{triton}/language/core.py:9 maximum", f"{script}:1 kernel", f"{triton}/runtime/interpreter.py:3 run")
    assert hang.where(stack) == f"computes at {script}:1: top = tl.maximum(top, new)"


def test_a_loop_that_turns_has_no_line(tmp_path: Path):
    """Seen of a learner's endless loop: the caller, a grader, was taken for where it stands."""
    script, grader = tmp_path / "train.py", tmp_path / "grader.py"
    turning = dump(f"{script}:0 step", f"{grader}:1 judge", f"{RANK}:4 run").replace("line 0 in", "line ??? in")
    assert hang.where(turning) == f"computes in step of {script}"


def test_a_line_is_as_the_file_has_it_now(tmp_path: Path):
    """A learner's file is graded again and again by one process."""
    script = tmp_path / "train.py"
    for line in ("group.all_reduce(x)", "group.all_reduce(x.contiguous())"):
        script.write_text(f"{line}\n")
        assert hang.where(dump(f"{GROUP}:6 all_reduce", f"{script}:1 step")).endswith(f"{script}:1: {line}")


def test_torchs_own_wait_leaves_no_frame_but_its_line_tells(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("work.wait()\n")
    assert hang.where(dump(f"{script}:1 step", f"{RANK}:4 run")) == f"waits in wait at {script}:1: work.wait()"


def test_a_collective_in_another_thread_is_found():
    backward = dump(f"{DIST}:9 all_reduce", "train.py:12 hook").replace("Current thread", "Thread")
    main = dump(
        f"{Path(torch.__file__).parent}/autograd/graph.py:1 backward", "train.py:30 step", "<string>:1 <module>"
    )
    assert hang.where(f"{backward}\n{main}") == "waits in all_reduce at train.py:12"


def test_a_thread_of_the_library_does_what_the_readers_line_waits_for(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("loss.backward()\n")
    thread = dump(f"{DIST}:9 broadcast", f"{GROUP}:3 run", f"{GROUP}:4 travel").replace("Current thread", "Thread")
    waiting = dump(f"{GROUP}:5 wait", f"{script}:1 step", f"{RANK}:4 run")
    at = f"wait at {script}:1: loss.backward()"
    assert hang.where(f"{thread}\n{waiting}") == f"lets bytes travel in {at}"
    assert hang.where(f"{thread.replace('travel', 'job')}\n{waiting}") == f"waits in {at}"


def test_a_package_beside_torch_is_the_readers():
    train = f"{Path(torch.__file__).parent}vision/train.py"
    assert hang.where(dump(f"{DIST}:9 barrier", f"{train}:3 step", f"{RANK}:4 run")) == f"waits in barrier at {train}:3"


def test_a_rank_still_in_the_launcher_has_no_line():
    assert hang.where(dump(f"{DIST}:9 init_process_group", f"{RANK}:4 run")) == "waits in init_process_group"


def test_of_two_dumps_the_first_tells():
    """Seen of C code that slept with Python's lock: the signal woke it, and the rank's thread answered behind."""
    thread = dump(f"{RANK}:3 _die_with_caller").replace("Current thread", "Thread")
    asleep, woken = (f"{thread}\n{dump(*frames, '<string>:1 <module>')}" for frames in (["train.py:12 step"], []))
    assert hang.where(asleep + woken) == hang.where(asleep) == "computes at train.py:12"


def test_half_a_dump_is_not_complete():
    whole = dump(f"{DIST}:9 barrier", "train.py:12 <module>", f"{RANK}:4 run", "<string>:1 <module>")
    assert not hang.is_complete("")
    assert not hang.is_complete(whole[:-2])


def test_a_dump_without_the_main_threads_frames_says_nothing():
    """A busy machine lets a rank write no more of it in time."""
    thread = dump(f"{GROUP}:3 run", f"{GROUP}:4 travel").replace("Current thread", "Thread")
    for half in ("", dump(), f"{thread}\n{dump()}"):
        assert hang.where(half).startswith("did not say where it stands")
