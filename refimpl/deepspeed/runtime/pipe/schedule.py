"""DeepSpeed's words for what a pipeline stage does, step by step: to read, print and compare, and for who runs his own.

All stages take their steps together, a forward or a backward in each. Of p stages, micro-batch k is at stage s

    in TrainSchedule        forward in step s + 2k, backward in step 2p - 1 - s + 2k: of 2 (m + p - 1)        1F1B
    in InferenceSchedule    in step s + k: of m + p - 1

so forwards and backwards take turns on every stage, and a value that is made in one step is sent in the next one. The
engine itself runs the tables of `refimpl.parallel.pipeline.schedules`, in which nobody waits for a common step.
DeepSpeed: deepspeed/runtime/pipe/schedule.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """One command to a stage; its options are its attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the weights."""


class ReduceGrads(PipeInstruction):
    """Average the gradients over the replicas."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of weights that stages share."""


class BufferOpInstruction(PipeInstruction):
    """A command for one buffer, which has a micro-batch's input and output."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read the inputs, or the labels."""


class ForwardPass(BufferOpInstruction): ...


class BackwardPass(BufferOpInstruction): ...


class SendActivation(BufferOpInstruction): ...


class RecvActivation(BufferOpInstruction): ...


class SendGrad(BufferOpInstruction): ...


class RecvGrad(BufferOpInstruction): ...


class PipeSchedule(ABC):
    """Of one stage; iterating gives its commands, a list a step."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        """ValueError for a stage that there is not, and for no micro-batch."""
        if micro_batches < 1 or not 0 <= stage_id < stages:
            raise ValueError(f"stage {stage_id} of {stages}, {micro_batches} micro-batches")
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The commands of each step."""

    @abstractmethod
    def num_pipe_buffers(self) -> int:
        """Buffers that a stage needs; commands number them from 0."""

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def buffer(self, micro: int) -> int:
        """That of a micro-batch."""
        return micro % self.num_pipe_buffers()

    def exists(self, micro: int) -> bool:
        return 0 <= micro < self.micro_batches


class InferenceSchedule(PipeSchedule):
    """Forward alone, with two buffers by turns."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            commands: list[PipeInstruction] = []
            if self.exists(micro) and (self.is_first_stage or self.is_last_stage):
                commands.append(LoadMicroBatch(self.buffer(micro)))
            send = [SendActivation(self.buffer(micro - 1))] if self.exists(micro - 1) and not self.is_last_stage else []
            receive = [RecvActivation(self.buffer(micro))] if self.exists(micro) and not self.is_first_stage else []
            # Of two neighbours one sends first and the other one receives: neither waits for the other for ever.
            commands += [*receive, *send] if self.stage_id % 2 else [*send, *receive]
            if self.exists(micro):
                commands.append(ForwardPass(self.buffer(micro)))
            yield commands

    def num_pipe_buffers(self) -> int:
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        total = 2 * (self.micro_batches + self.stages - 1)
        for step in range(total):
            (micro, forward), (before, _) = self.at(step), self.at(step - 1)
            commands = self.messages(micro, before, forward)
            if self.exists(micro):
                if forward and (self.is_first_stage or self.is_last_stage):
                    commands.append(LoadMicroBatch(self.buffer(micro)))
                commands.append((ForwardPass if forward else BackwardPass)(self.buffer(micro)))
            if step == total - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def at(self, step: int) -> tuple[int, bool]:
        """(micro-batch, whether it goes forward); one that does not exist where the stage idles."""
        forward = (step - self.stage_id) % 2 == 0
        begin = self.stage_id if forward else 2 * self.stages - 1 - self.stage_id
        return (step - begin) // 2, forward

    def messages(self, micro: int, before: int, forward: bool) -> list[PipeInstruction]:
        """What this step's micro-batch needs, and what the one before it, which went the other way, has made."""
        found: list[PipeInstruction] = []
        if forward and not self.is_first_stage:
            found += [SendGrad(self.buffer(before))] if self.exists(before) else []
            found += [RecvActivation(self.buffer(micro))] if self.exists(micro) else []
        if not forward and not self.is_last_stage:
            found += [RecvGrad(self.buffer(micro))] if self.exists(micro) else []
            found += [SendActivation(self.buffer(before))] if self.exists(before) else []
        return found

    def num_pipe_buffers(self) -> int:
        """As many as micro-batches are alive here, two at least."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """One stage: micro-batch after micro-batch."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro in range(self.micro_batches):
            last: list[PipeInstruction] = [ReduceGrads(), OptimizerStep()] if micro == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *last]

    def num_pipe_buffers(self) -> int:
        return 1
