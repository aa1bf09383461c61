"""DeepSpeed's schedules: each message has its other end in the same step, and what is computed is 1F1B's table."""

from itertools import pairwise

import pytest

from refimpl.deepspeed.runtime.pipe import schedule
from refimpl.parallel.pipeline.schedules.named import schedule as table
from refimpl.parallel.pipeline.schedules.table import whole

SIZES = [(p, m) for p in (1, 2, 3, 4, 5) for m in (1, 2, 3, 8)]


@pytest.mark.parametrize(("stages", "micro"), SIZES)
def test_a_training_step_is_1f1b(stages: int, micro: int) -> None:
    orders = table("1f1b", stages, micro).orders
    steps = [list(schedule.TrainSchedule(micro, stages, stage)) for stage in range(stages)]
    for stage, commands in enumerate(steps):
        plan, done = schedule.TrainSchedule(micro, stages, stage), {"F": 0, "B": 0}
        order = []
        for command in (command for step in commands for command in step):
            if isinstance(command, schedule.ForwardPass | schedule.BackwardPass):
                kind = "F" if isinstance(command, schedule.ForwardPass) else "B"
                assert command.buffer_id == done[kind] % plan.num_pipe_buffers()
                order.append((kind, stage, done[kind]))
                done[kind] += 1
        assert order == [tuple(op) for op in orders[stage]]
        assert [str(c) for c in commands[-1][-3:]] == ["ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()"]


@pytest.mark.parametrize("kind", [schedule.TrainSchedule, schedule.InferenceSchedule])
@pytest.mark.parametrize(("stages", "micro"), SIZES)
def test_every_message_has_its_other_end_in_the_same_step(
    kind: type[schedule.PipeSchedule], stages: int, micro: int
) -> None:
    every = [list(kind(micro, stages, stage)) for stage in range(stages)]
    assert len({len(steps) for steps in every}) == 1
    for step in zip(*every, strict=True):
        said = [[type(command).__name__ for command in commands] for commands in step]
        for here, there in pairwise(said):
            assert ("SendActivation" in here) == ("RecvActivation" in there)
            assert ("RecvGrad" in here) == ("SendGrad" in there)
    loads = [sum("Load" in str(command) for step in steps for command in step) for steps in every]
    assert loads == [micro if stage in (0, stages - 1) else 0 for stage in range(stages)]


def test_messages_of_a_step_stand_in_deepspeeds_order() -> None:
    """Of a forward step: the gradient of the one before goes back, then activations come; its neighbour the same."""
    steps = [[type(command).__name__ for command in step] for step in schedule.TrainSchedule(8, 4, 1)]
    both = [names for names in steps if {"SendGrad", "RecvActivation"} <= {*names}]
    assert both == [["SendGrad", "RecvActivation", "ForwardPass"]] * 5
    both = [names for names in steps if {"RecvGrad", "SendActivation"} <= {*names}]
    assert both == [["RecvGrad", "SendActivation", "BackwardPass"]] * 6


def test_of_two_neighbours_one_sends_first() -> None:
    """Else each would wait for the other to receive, where a send ends with its receipt."""
    for stage in (1, 2):
        steps = [[type(command).__name__ for command in step] for step in schedule.InferenceSchedule(8, 4, stage)]
        both = [names[:2] for names in steps if {"SendActivation", "RecvActivation"} <= {*names}]
        assert both == [["RecvActivation", "SendActivation"][:: 1 if stage % 2 else -1]] * 7


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("forward_only", [False, True])
def test_dualpipe_v_is_the_table_with_whole_backwards(ranks: int, forward_only: bool) -> None:
    for micro in (2 * ranks, 3 * ranks + 1):
        for rank, planned in enumerate(whole(table("dualpipe-v", ranks, micro)).orders):
            steps = list(schedule.DualPipeVSchedule(micro, ranks, rank, forward_only))
            order = []
            for command in (command for step in steps for command in step):
                if isinstance(command, schedule.ForwardPass | schedule.BackwardPass):
                    phase, k = divmod(command.buffer_id, micro)
                    assert phase == command.kwargs["phase"]
                    order.append((command.name[0], 2 * ranks - 1 - rank if phase else rank, k))
            assert order == [tuple(op) for op in planned if op.kind == "F" or not forward_only]
            assert len(steps[-1]) == (1 if forward_only else 4)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dualpipe_vs_messages_have_two_ends_in_one_order(ranks: int) -> None:
    """As many on a way between two ranks, by the same buffers, and all are waited for."""
    micro = 2 * ranks + 1
    ways: dict[tuple[int, int, int, str], dict[str, list[int]]] = {}
    for rank in range(ranks):
        commands = [c for step in schedule.DualPipeVSchedule(micro, ranks, rank) for c in step]
        for command in commands:
            if command.name[:4] in ("Send", "Recv"):
                end, what, phase = command.name[:4], command.name[4:5], command.kwargs["phase"]
                down = (what == "A") == (phase == 0)  # activations of phase 0, gradients of phase 1
                other = rank + (1 if down == (end == "Send") else -1)
                way = (*((rank, other) if end == "Send" else (other, rank)), phase, what)
                ways.setdefault(way, {}).setdefault(end, []).append(command.kwargs["buffer_id"])
        assert commands[-4].name == "CommitP2P"
    assert len(ways) == 4 * (ranks - 1)
    for ends in ways.values():
        assert ends["Send"] == ends["Recv"]
        assert len(ends["Send"]) == micro


def test_one_stage_and_stages_that_there_are_not() -> None:
    steps = list(schedule.DataParallelSchedule(2, 1, 0))
    assert [len(step) for step in steps] == [3, 5]
    assert repr(steps[0][1]) == "ForwardPass(buffer_id=0)"
    for stage, micro in ((3, 1), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match=f"stage {stage} of 3, {micro} micro-batches"):
            schedule.TrainSchedule(micro, 3, stage)
    with pytest.raises(ValueError, match="DualPipeV over 3 ranks needs 6 micro-batches, not 5"):
        schedule.DualPipeVSchedule(5, 3, 0)
