"""DeepSpeed's schedules: each message has its other end in the same step, and what is computed is 1F1B's table."""

from itertools import pairwise

import pytest

from refimpl.deepspeed.runtime.pipe import schedule
from refimpl.parallel.pipeline.schedules.named import schedule as table

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


def test_one_stage_and_stages_that_there_are_not() -> None:
    steps = list(schedule.DataParallelSchedule(2, 1, 0))
    assert [len(step) for step in steps] == [3, 5]
    assert repr(steps[0][1]) == "ForwardPass(buffer_id=0)"
    for stage, micro in ((3, 1), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match=f"stage {stage} of 3, {micro} micro-batches"):
            schedule.TrainSchedule(micro, 3, stage)
